"""The front door: a model, its tokenizer and an engine, to generate and to stream."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from lockstep.assemble import build_engine, settle_options
from lockstep.config import EngineConfig, ModelConfig, engine_options
from lockstep.errors import CheckpointError, ConfigError, RequestError
from lockstep.families import read_config_files, read_model_config
from lockstep.memory import describe, idle_features, plan_memory, torch_dtype
from lockstep.parameters import make_parameters
from lockstep.request import FinishReason, RequestOutput, SamplingParams
from lockstep.stream import Reply, StreamDelta
from lockstep.tokenizer import Tokenizer
from lockstep.weights import Checkpoint, RandomWeights

#: Messages of a conversation, each with ``role`` and ``content``.
Messages = Sequence[Mapping[str, str]]
#: Text, token ids, or messages.
Prompt = str | Sequence[int] | Messages
#: For all prompts, or one for each.
Sampling = SamplingParams | Sequence[SamplingParams] | None

#: The checkpoint that comes with the package, under the name that users give.
DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo_model"

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class LLM:
    """A language model ready to generate.

    Args:
        model: A checkpoint folder, ``"demo"`` for the one that comes with the package,
            or a `ModelConfig` to be filled with random weights.
        backend: ``reference`` or ``optimized``.
        device: ``cpu``, ``cuda``, ``cuda:1``...; ``auto`` is a GPU if there is one.
        dtype: Dtype of weights and activations; ``auto`` is the checkpoint's on a GPU
            and float32 on a CPU.
        config: Budgets, cache and checks of the engine.
        components: Replacements of single components, such as
            ``{"scan.scan_prefill": my_scan}``.
        weights: How random weights are drawn; only with a `ModelConfig`.
        verbose: Whether the memory plan is printed and progress shown, on stderr.
        options: Options of `EngineConfig` by name, in place of those of ``config``.

    Attributes:
        model_config: The model.
        sizes: Every size of the engine, settled.
        engine: The engine; `generate` drives it, and so may you, while neither that nor
            a stream is under way. Threads may call all else side by side.

    Raises:
        CheckpointError: A folder that is missing, damaged or does not fit its config.
        ConfigError: A model, an option or a budget that cannot work.
    """

    def __init__(
        self,
        model: str | PathLike[str] | ModelConfig,
        backend: str = "reference",
        device: str = "auto",
        dtype: str = "auto",
        config: EngineConfig | None = None,
        components: Mapping[str, Any] | None = None,
        weights: RandomWeights | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        """Load or draw the weights and build the engine."""
        engine_config = engine_options(config or EngineConfig(), options)
        folder = None
        if not isinstance(model, ModelConfig):
            folder = find_folder(model)
            model = read_model_config(read_config_files(folder))
        if folder and weights:
            raise ConfigError("random weights go with a config, not with a checkpoint")
        self.model_config, self.verbose = model, verbose
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, model, self.device)
        where = self.dtype, self.device
        if self.device.type == "cuda":
            # An engine that nobody has any more may hold the card's memory until then.
            gc.collect()
        engine_config = settle_options(engine_config, backend, self.device)
        self.sizes = plan_memory(model, engine_config, self.device, self.dtype)
        if verbose:
            print(describe(model, self.sizes, *where), file=sys.stderr)
        if idle := idle_features(model, engine_config, self.sizes):
            warnings.warn(idle, stacklevel=2)
        self._tokenizer = Tokenizer.from_folder(folder) if folder else None
        source = weights or RandomWeights()
        if folder:
            source = Checkpoint(folder, model, self.device)
        progress = partial(self._show, "loading weights")
        parameters = make_parameters(model, *where, source.fill, progress)
        parts = model, engine_config, self.sizes, parameters, self.device
        self.engine: Any = build_engine(*parts, backend, components)
        self._replies: dict[str, Reply] = {}
        # Threads take turns at the engine; each step serves the requests of all.
        self._lock = threading.RLock()

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | ModelConfig,
        weights: RandomWeights | None = None,
        engine_config: EngineConfig | None = None,
        **options: Any,
    ) -> LLM:
        """Build a model of any shape, without a folder, with random weights.

        Args:
            config: The fields of a Hugging Face config, or a `ModelConfig`.
            weights: How weights are drawn; `RandomWeights` as it is unless given.
            engine_config: Budgets, cache and checks; ``config`` of the class itself.
            options: Further arguments of the class, options of `EngineConfig` among
                them.
        """
        model = config if isinstance(config, ModelConfig) else read_model_config(config)
        return cls(model, config=engine_config, weights=weights, **options)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            RequestError: There is none.
        """
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer: prompts and outputs are token ids alone"
            )
        return self._tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: One prompt or several; a prompt is text, a list of token ids, or
                the messages of a conversation.
            sampling_params: For all prompts, or one for each.

        Returns:
            An output for each prompt, in their order; with its text if the model has a
            tokenizer.

        Raises:
            RequestError: Some prompts cannot be served. All are checked before any is
                started, and every fault is listed.
        """
        checked = self._check(_as_list(prompts), sampling_params)
        outputs: dict[int, RequestOutput] = {}
        with closing(self._stream(checked)) as deltas:
            last = ((delta.index, delta.output) for delta in deltas if delta.output)
            outputs.update(self._show("generating", last, len(checked)))
        return [outputs[index] for index in range(len(checked))]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None
    ) -> Generator[StreamDelta, None, None]:
        """Continue prompts and give out what comes when it comes, as it comes.

        The requests start with the first delta asked for. Closing the iterator aborts
        those that are not done; any number may be open side by side.

        Args:
            prompts: As of `generate`.
            sampling_params: As of `generate`.

        Raises:
            RequestError: As of `generate`, before anything starts.
        """
        return self._stream(self._check(_as_list(prompts), sampling_params))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling = None,
    ) -> list[RequestOutput]:
        """Answer a conversation or several; errors are those of `generate`.

        The text of every message is tokenized; `lockstep.chat.Chat` keeps the ids of
        earlier turns instead, so that their replies are reused whatever they hold.

        Args:
            messages: Each with ``role`` and ``content``.
            sampling_params: For all conversations, or one for each.
        """
        prompts = _as_list(messages)
        if not all(map(_is_conversation, prompts)):
            raise RequestError("chat takes messages, each with role and content")
        return self.generate(prompts, sampling_params)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, whose stream ends too; an unknown one is ignored.

        Returns:
            What it gave so far, if it was in flight.
        """
        with self._lock:
            return self._end(request_id, FinishReason.ABORT)

    def _check(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[tuple[list[int], SamplingParams]]:
        """Turn prompts into token ids and let the engine judge each."""
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        given: Any = sampling
        if bad := [each for each in given if not isinstance(each, SamplingParams)]:
            raise RequestError(f"sampling parameters are SamplingParams, not {bad[0]}")
        if len(sampling) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(sampling)} sampling parameters"
            )
        checked: list[tuple[list[int], SamplingParams]] = []
        faults: list[str] = []
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            try:
                token_ids = self._token_ids(prompt)
                self.engine.check(token_ids, params)
                if params.stop and self._tokenizer is None:
                    raise RequestError("stop strings need a tokenizer; there is none")
                checked.append((token_ids, params))
            except RequestError as error:
                faults.append(f"prompt {index}: {error}")
        if faults:
            raise RequestError("\n".join(faults))
        return checked

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if _is_conversation(prompt):
            return self.tokenizer.apply_chat_template(prompt)
        if not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise RequestError(
                f"a prompt is text, a list of token ids or messages, not {kind}"
            )
        return list(prompt)

    def _stream(
        self, checked: Sequence[tuple[list[int], SamplingParams]]
    ) -> Generator[StreamDelta, None, None]:
        """Run requests to their end; the engine steps while nothing lies ready."""
        mine: list[Reply] = []
        try:
            for index, (token_ids, params) in enumerate(checked):
                with self._lock:
                    name = self.engine.add(token_ids, params)
                    reply = Reply(index, name, params.stop, self._tokenizer)
                    self._replies[name] = reply
                    mine.append(reply)
            waiting = mine
            while waiting:
                with self._lock:
                    if not any(reply.deltas for reply in waiting):
                        self._step()
                    ready = [delta for reply in waiting for delta in reply.deltas]
                    for reply in waiting:
                        reply.deltas.clear()
                    waiting = [each for each in waiting if not each.output]
                yield from ready
        finally:
            with self._lock:
                for reply in mine:
                    self.abort(reply.request_id)
                    self._replies.pop(reply.request_id, None)

    def _step(self) -> None:
        """Step the engine and hand out what came, to whichever stream it belongs."""
        if not self.engine.has_work:
            raise RequestError("the engine was emptied while a stream was open")
        record = self.engine.step()
        finished = {output.request_id: output for output in record.finished}
        for name in {**record.tokens, **finished}:
            if name not in self._replies:
                continue
            reply = self._replies[name]
            if output := finished.get(name):
                self._close(output)
                continue
            request = self.engine.scheduler.find(name)
            logprobs = None if request.sampling.logprobs is None else request.logprobs
            reply.take(request.token_ids[len(request.prompt_token_ids) :], logprobs)
            if reply.has_stopped:
                self._end(name, FinishReason.STOP)

    def _end(self, request_id: str, reason: FinishReason) -> RequestOutput | None:
        """End a request early."""
        output = self.engine.abort(request_id, reason)
        return self._close(output) if output else None

    def _close(self, output: RequestOutput) -> RequestOutput:
        """Give a request's last tokens and its output to its stream, if it has one."""
        reply = self._replies.pop(output.request_id, None)
        if reply is None:
            return output
        reply.take(output.token_ids, output.logprobs, output)
        return reply.output or output

    def _show(self, what: str, items: Iterable[Any], total: int = 0) -> Iterable[Any]:
        """Show a progress bar where somebody watches; 0 asks the items how many."""
        if not (self.verbose and sys.stderr.isatty()):
            return items
        from rich.console import Console
        from rich.progress import track

        screen = Console(stderr=True)
        return track(items, what, total or None, console=screen, transient=True)


def _as_list(prompts: Any) -> list[Prompt]:
    """Tell one prompt from several."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        kind = type(prompts).__name__
        raise RequestError(f"prompts are text or lists, one or many, not {kind}")
    is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one or _is_conversation(prompts) else list(prompts)


def _is_conversation(prompt: Any) -> bool:
    """Tell messages from other prompts."""
    return bool(prompt and isinstance(prompt, list | tuple)) and all(
        isinstance(message, Mapping) for message in prompt
    )


def find_folder(model: str | PathLike[str]) -> Path:
    """Find a checkpoint's folder by path, or by the demo's name."""
    folder = DEMO_FOLDER if model == DEMO else Path(model)
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(model)!r} is not a folder; a model is a checkpoint folder, or "
            f"{DEMO!r} for the one that comes with Lockstep"
        )
    return folder


def find_device(name: str) -> torch.device:
    """Find a device by name; ``auto`` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no GPU; use cpu")
    return device


def find_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Find a dtype by name; ``auto`` is the model's on a GPU, float32 on a CPU."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; known are {', '.join(DTYPES)}")
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    return torch_dtype(name)
