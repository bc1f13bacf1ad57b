"""The front door: a model, its tokenizer and an engine behind ``generate``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from lockstep.assemble import build_engine
from lockstep.config import EngineConfig, ModelConfig, engine_options
from lockstep.errors import CheckpointError, ConfigError, RequestError
from lockstep.families import read_config_files, read_model_config
from lockstep.memory import describe, idle_features, plan_memory, torch_dtype
from lockstep.parameters import make_parameters
from lockstep.request import RequestOutput, SamplingParams
from lockstep.tokenizer import Tokenizer
from lockstep.weights import Checkpoint, RandomWeights

#: Text, or token ids.
Prompt = str | Sequence[int]

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
        engine: The engine; `generate` drives it, and so may you.

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
            folder = _find_folder(model)
            model = read_model_config(read_config_files(folder))
        if folder and weights:
            raise ConfigError("random weights go with a config, not with a checkpoint")
        self.model_config, self.verbose = model, verbose
        self.device = _find_device(device)
        self.dtype = _find_dtype(dtype, model, self.device)
        where = self.dtype, self.device
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
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: One prompt or several; a prompt is text or a list of token ids.
            sampling_params: For all prompts, or one for each.

        Returns:
            An output for each prompt, in their order; with its text if the model has a
            tokenizer.

        Raises:
            RequestError: Some prompts cannot be served. All are checked before any is
                started, and every fault is listed.
        """
        prompts = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        checked = self._check(prompts, sampling_params)
        ids: list[str] = [self.engine.add(*request) for request in checked]
        outputs: dict[str, RequestOutput] = {}
        try:
            for output in self._show("generating", self._run(set(ids)), len(ids)):
                outputs[output.request_id] = output
        except BaseException:
            for request_id in set(ids) - set(outputs):
                self.engine.abort(request_id)
            raise
        return [outputs[request_id] for request_id in ids]

    def _check(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]
    ) -> list[tuple[list[int], SamplingParams]]:
        """Turn prompts into token ids and let the engine judge each."""
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
                checked.append((token_ids, params))
            except RequestError as error:
                faults.append(f"prompt {index}: {error}")
        if faults:
            raise RequestError("\n".join(faults))
        return checked

    def _token_ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise RequestError(f"a prompt is text or a list of token ids, not {kind}")
        return list(prompt)

    def _run(self, pending: set[str]) -> Iterator[RequestOutput]:
        """Step the engine and give out the pending requests as they finish."""
        tokenizer = self._tokenizer
        while pending:
            for output in self.engine.step().finished:
                if output.request_id in pending:
                    pending.remove(output.request_id)
                    text = tokenizer.decode(output.token_ids) if tokenizer else ""
                    yield replace(output, text=text)

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
    is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


def _find_folder(model: str | PathLike[str]) -> Path:
    folder = DEMO_FOLDER if model == DEMO else Path(model)
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(model)!r} is not a folder; a model is a checkpoint folder, or "
            f"{DEMO!r} for the one that comes with Lockstep"
        )
    return folder


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no GPU; use cpu")
    return device


def _find_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; known are {', '.join(DTYPES)}")
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    return torch_dtype(name)
