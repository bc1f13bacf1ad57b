"""Certificates: a checkpoint on both backends against the model code of transformers.

Log-probabilities of every position of several texts are compared, each a prompt and
what transformers greedily makes of it, in every way that an engine has to compute them.
A way in which what it is for did not happen, such as a restore, is not passed, nor one
in which what it is not did. Ways, and known faults of transformers, stand in
``certificate.toml``.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jinja2 import StrictUndefined, Template
from rich.console import Console
from rich.progress import track
from torch import Tensor

from lockstep import __version__
from lockstep.assemble import BACKENDS
from lockstep.blocks import num_blocks_for
from lockstep.config import ModelConfig
from lockstep.errors import ConfigError
from lockstep.families import read_config_files, read_model_config
from lockstep.llm import DEMO, DEMO_FOLDER, find_device, find_dtype, find_folder
from lockstep.parameters import num_parameters
from lockstep.plan import RowKind
from lockstep.request import SamplingParams
from lockstep.trace import StepRecord

from .compare import COARSEST, LIBRARY_FACTOR
from .library import Library
from .report import events_of
from .sides import Setup, Side, make_setup

T = TypeVar("T")
#: Tokens by which transformers continues each prompt.
NEW_TOKENS = 12
#: Block of a model that has no scan chunk of its own.
BLOCK = 16
_HERE = Path(__file__)


class Way(NamedTuple):
    """A way to compute texts: a table of ``certificate.toml``."""

    about: str
    needs: list[str]
    bars: list[str] = []
    options: dict[str, Any] = {}
    given: str = "prompt"
    cached: bool = False
    restored: bool = False
    reference: bool = True


TABLES = tomllib.loads(_HERE.with_suffix(".toml").read_text(encoding="utf-8"))
WAYS = {name: Way(**table) for name, table in TABLES["ways"].items()}


class Text(NamedTuple):
    """A prompt, its continuation, and what transformers says after all but the last.

    Attributes:
        token_ids: Prompt and continuation.
        prompt: Tokens of the prompt.
        expected: Log-probabilities in the dtype asked for.
        exact: The same in float64.
    """

    token_ids: list[int]
    prompt: int
    expected: Tensor
    exact: Tensor


@dataclass
class Result:
    """What came of one way on one backend.

    Attributes:
        way: Name of the way.
        backend: Whose engine.
        worst: Largest difference of a log-probability from transformers.
        prompt: Length of the prompt after which that was.
        position: Where that was.
        from_float64: Largest difference from transformers in float64.
        positions: Positions compared; one that was computed again counts again.
        tokens: Those of them after which a token of the continuation comes.
        equal_tokens: Those where the same token is the likeliest.
        ties: Those where another is, by at most twice the bound.
        missed: Positions that should have been compared, and were not.
        restored: Lengths of the prompts whose beginning was restored.
        events: What happened, how often.
        fault: Why it is not passed; empty if it is.
        skipped: Why it was not run; empty if it was.
    """

    way: str
    backend: str
    worst: float = -1.0
    prompt: int = 0
    position: int = 0
    from_float64: float = 0.0
    positions: int = 0
    tokens: int = 0
    equal_tokens: int = 0
    ties: int = 0
    missed: int = 0
    restored: list[int] = field(default_factory=list[int])
    events: dict[str, int] = field(default_factory=dict[str, int])
    fault: str = ""
    skipped: str = ""

    def note(self, text: Text, start: int, actual: Tensor, bound: float) -> None:
        """Take in what was computed of a text, from a position on."""
        end = start + len(actual)
        expected, exact = text.expected[start:end], text.exact[start:end]
        errors = differences(actual, expected).amax(1)
        if (worst := float(errors.max())) > self.worst:
            at = start + int(errors.argmax())
            self.worst, self.prompt, self.position = worst, text.prompt, at
        gap = float(differences(actual, exact).max())
        self.from_float64 = max(self.from_float64, gap)
        self.positions += len(actual)
        # The first row after which a token of the continuation comes.
        first = max(0, text.prompt - 1 - start)
        likeliest = actual[first:].argmax(1)
        others = likeliest != torch.tensor(text.token_ids)[start + first + 1 : end + 1]
        theirs = expected[first:].gather(1, likeliest[:, None])[:, 0]
        ties = others & (expected[first:].amax(1) - theirs <= 2 * bound)
        self.tokens += len(likeliest)
        self.equal_tokens += int((~others).sum())
        self.ties += int(ties.sum())

    def judge(self, way: Way, bound: float) -> None:
        """Say what is wrong, if anything is and nothing has been said."""
        missing = [name for name in way.needs if not self.events.get(name)]
        barred = [name for name in way.bars if self.events.get(name)]
        where = f"position {self.position} of the prompt of {self.prompt} tokens"
        others = self.tokens - self.equal_tokens - self.ties
        found = {
            f"differs by {self.worst:.1e} at {where}": self.worst > bound,
            f"{others} of {self.tokens} tokens are others": others,
            f"there were no {' and no '.join(missing)}": missing,
            f"there were {' and '.join(barred)}": barred,
            f"{self.missed} positions were not compared": self.missed,
            "nothing was compared": not self.positions,
        }
        faults = [text for text, is_so in found.items() if is_so]
        self.fault = self.fault or next(iter(faults), "")


@dataclass(frozen=True)
class Certificate:
    """What a checkpoint was held to, and what came of it.

    Attributes:
        content: All there is to know, as in the JSON.
    """

    content: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether nothing failed, where a failure would have been seen."""
        return self.content["verdict"] == "PASS"

    @property
    def page(self) -> str:
        """All of it on a page of Markdown."""
        text = _HERE.with_suffix(".md.jinja").read_text(encoding="utf-8")
        form = Template(
            text, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
        )
        return form.render(**self.content, worst=self._worst) + "\n"

    @property
    def _worst(self) -> float:
        """Largest difference of a log-probability."""
        return max((each["worst"] for each in self.content["results"]), default=0.0)

    def __str__(self) -> str:
        """Say it in a line, or in one for each failure."""
        if failures := self.content["failures"]:
            return "\n".join(f"FAIL {each}" for each in failures)
        name, bound = self.content["name"], self.content["bound"]
        if replaced := self.content["components"]:
            name = f"{name} with another {' and '.join(replaced)}"
        said = f"{name}: {self._worst:.1e} from transformers, {bound:.1e} allowed"
        more = "" if self.passed else ", which is too much to tell; float32 tells more"
        return f"{self.content['verdict']} {said}{more}"

    def write(self, folder: str | PathLike[str]) -> Path:
        """Write ``NAME.json`` and the page made of it; return the page's path."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{self.content['name']}.md"
        text = json.dumps(self.content, indent=1) + "\n"
        path.with_suffix(".json").write_text(text, encoding="utf-8")
        path.write_text(self.page, encoding="utf-8")
        return path


def certify(
    model: str | PathLike[str] = DEMO,
    components: Mapping[str, Any] | None = None,
    *,
    backends: Sequence[str] = BACKENDS,
    ways: Iterable[str] = WAYS,
    device: str = "cpu",
    reference_device: str | None = None,
    dtype: str = "float32",
    commit: str = "",
    verbose: bool = False,
) -> Certificate:
    """Hold both backends to the model code of transformers on a checkpoint.

    Args:
        model: ``demo`` or a checkpoint folder.
        components: Components that are replaced, on each backend.
        backends: Which are judged.
        ways: Names of the ways to be tried.
        device: Where transformers and the optimized backend run.
        reference_device: Where the reference runs; there too unless set.
        dtype: Of weights and activations, to which the checkpoint's are brought.
        commit: Of Lockstep, where git cannot say.
        verbose: Whether a bar on a terminal shows how far it is.

    Raises:
        ConfigError: A family, an option or a device that cannot work, a way or a
            backend that does not exist, a model of too few positions, or a transformers
            that lacks the model.
        CheckpointError: A folder that is missing or damaged.
    """
    ways, backends = [*ways], [*backends]
    _check_known(ways, WAYS)
    _check_known(backends, BACKENDS)
    folder, where = find_folder(model), find_device(device)
    home = find_device(reference_device or device)
    config = read_model_config(read_config_files(folder))
    _check_room(config)
    dtype = str(find_dtype(dtype, config, where)).removeprefix("torch.")
    if dtype == "float64":
        raise ConfigError("dtype is float64, by which the others are judged")
    places = {name: home if name == "reference" else where for name in backends}
    setups = _set_up(folder, config, {*places.values()}, dtype)
    block = setups[places[backends[0]]].sizes.block_size
    texts = [*_texts(Library(folder, config, where, dtype), config, block, verbose)]
    rounding = max(float(differences(e.expected, e.exact).max()) for e in texts)
    bound = LIBRARY_FACTOR * rounding
    results = [Result(*pair) for pair in _pairs(ways, backends)]
    for each in _shown("comparing", results, verbose):
        _try(each, texts, bound, setups[places[each.backend]], components or {})
    failures = [*_failures(results, bound)]
    return Certificate(
        {
            "verdict": _verdict(failures, bound),
            "failures": failures,
            **_about(folder, config, commit),
            "components": {n: _name(part) for n, part in (components or {}).items()},
            **_tried(results, places | {"transformers": where}),
            "dtype": dtype,
            "block": block,
            "prompts": [text.prompt for text in texts],
            "new_tokens": NEW_TOKENS,
            "ways": {each.way: WAYS[each.way].about for each in results},
            "rounding": rounding,
            "bound": bound,
            "results": [asdict(each) for each in results],
        }
    )


def _check_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that does not exist."""
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {name!r}; known are {', '.join(known)}")


def _check_room(config: ModelConfig) -> None:
    """Refuse a model in which no prompt has room."""
    if config.max_positions <= NEW_TOKENS:
        raise ConfigError(
            f"the model has {config.max_positions} positions; a certificate needs "
            f"{NEW_TOKENS + 1}, for a prompt and {NEW_TOKENS} tokens after it: raise "
            "max_position_embeddings in config.json if it can have more"
        )


def _pairs(ways: Iterable[str], backends: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pair ways with the backends that have them."""
    pairs = product(ways, backends)
    yield from (e for e in pairs if e[1] != "reference" or WAYS[e[0]].reference)


def _tried(
    results: Iterable[Result], places: Mapping[str, torch.device]
) -> dict[str, dict[str, Any]]:
    """Name the engines of each way that ran, all others that there are, and devices."""
    ran = {(each.way, each.backend) for each in results if not each.skipped}
    tried: dict[str, dict[str, list[str]]] = {"ran": {}, "not_run": {}}
    for way, side in _pairs(WAYS, BACKENDS):
        kind = "ran" if (way, side) in ran else "not_run"
        tried[kind].setdefault(way, []).append(side)
    used = {"transformers", *(side for _, side in ran)}
    devices = {name: _describe(place) for name, place in places.items() if name in used}
    return {**tried, "devices": devices}


def _set_up(
    folder: Path, config: ModelConfig, places: Iterable[torch.device], dtype: str
) -> dict[torch.device, Setup]:
    """Settle sizes and read the weights, once for each device."""
    options: dict[str, Any] = {} if config.mamba else {"block_size": BLOCK}
    return {each: make_setup(str(folder), options, each, dtype) for each in places}


def _failures(results: Sequence[Result], bound: float) -> Iterator[str]:
    """Say why a checkpoint is not passed."""
    yield from (f"{e.way}, {e.backend}: {e.fault}" for e in results if e.fault)
    if all(each.skipped for each in results):
        yield "nothing was compared"
    if not math.isfinite(bound):
        yield "transformers gives log-probabilities that are no numbers"


def _verdict(failures: Sequence[str], bound: float) -> str:
    """Say FAIL, PASS or, where hardly anything would fail, that this is so."""
    return "FAIL" if failures else "PASS" if bound <= COARSEST else "TOO COARSE"


def _texts(
    library: Library, config: ModelConfig, block: int, verbose: bool
) -> Iterator[Text]:
    """Draw prompts of lengths where something begins or ends; have them continued."""
    window = config.mamba.conv_window if config.mamba else 1
    lengths = {1, window, window + 1, 4 * block + 3}
    lengths |= {count * block + near for count in (1, 2) for near in (-1, 0, 1)}
    most = config.max_positions - NEW_TOKENS
    draw = torch.Generator().manual_seed(0)
    found: list[tuple[list[int], int, Tensor]] = []
    fitting = [length for length in sorted(lengths) if length <= most]
    for length in _shown("running transformers", fitting, verbose):
        prompt = torch.randint(config.vocab_size, (length,), generator=draw).tolist()
        token_ids = library.greedy(prompt, NEW_TOKENS)
        found.append((token_ids, length, library.logprobs(token_ids[:-1])))
    library.widen()
    for each in found:
        yield Text(*each, library.logprobs(each[0][:-1]))


def _try(
    result: Result,
    texts: Sequence[Text],
    bound: float,
    setup: Setup,
    components: Mapping[str, Any],
) -> None:
    """Compute all texts in one way, and compare."""
    way, has_states = WAYS[result.way], setup.model_config.mamba is not None
    graphs = str(way.options.get("graphs"))
    if graphs == "all" and setup.device.type != "cuda":
        result.skipped, result.worst = "not run: needs a GPU", 0.0
        return
    engine = _build(result, texts, setup, components)
    if way.cached:
        _run(engine, texts, "all", lambda record: None)
    mode = {"padded": "padded", "all": "graph"}.get(graphs, "eager")
    stored = range(engine.sizes.first_snapshot_slot, engine.sizes.zero_slot)
    count, starts, seen = Counter[str](), dict[int, int](), set[tuple[int, int]]()

    def look(record: StepRecord) -> None:
        count.update(events_of(record, record))
        count["shared steps"] += len(record.rows) > 1
        count["replayed graphs"] += record.mode == "graph"
        count["eager steps"] += bool(record.rows) and record.mode != mode
        for row in record.rows:
            index = int(row.request_id)
            start = starts.setdefault(index, row.start)
            is_cut = row.kind is RowKind.PREFILL and row.start and row.cache is None
            count["continued prompts"] += bool(is_cut)
            count["restored states"] += row.initial_slot_id in stored
            rows = record.logprobs.get(row.request_id)
            if rows is not None and (start or not way.restored):
                result.note(texts[index], row.start, rows.cpu(), bound)
                seen.update((index, row.start + at) for at in range(len(rows)))
        for why in record.failed.values():
            result.fault = result.fault or why

    _run(engine, texts, way.given, look)
    result.events = dict(+count)
    result.restored = [texts[index].prompt for index in starts if starts[index]]
    for index, text in enumerate(texts):
        start, end = starts.get(index, 0), len(text.token_ids) - 1
        if start or not way.restored:
            result.missed += sum((index, at) not in seen for at in range(start, end))
    needs = [name for name in way.needs if has_states or name != "restored states"]
    result.judge(way._replace(needs=needs), bound)


def _build(
    result: Result, texts: Sequence[Text], setup: Setup, components: Mapping[str, Any]
) -> Any:
    """Build an engine for a way, in which the texts just fit."""
    way, block = WAYS[result.way], setup.sizes.block_size
    longest = max(len(text.token_ids) for text in texts)
    blocks = [num_blocks_for(len(text.token_ids), block) for text in texts]
    tight = {"max_tokens_per_step": longest, "num_blocks": max(blocks)}
    # A step is no multiple of a block, so that prompts are cut within.
    room = {"max_tokens_per_step": block * 3 // 2 - 1, "num_blocks": sum(blocks)}
    options: dict[str, Any] = {"max_length": longest, "snapshot_slots": 2 * len(texts)}
    own = {n: tight[n] if v == "longest" else v for n, v in way.options.items()}
    options |= room | own
    if result.backend != "reference":
        options.setdefault("graphs", "off")
    return Side(result.backend, options=options).build(setup, components)


def _run(
    engine: Any,
    texts: Sequence[Text],
    given: str,
    look: Callable[[StepRecord], object],
) -> None:
    """Let an engine compute texts, token for token as they are."""
    for index, text in enumerate(texts):
        length = len(text.token_ids)
        count = {"all": length - 1, "prompt": text.prompt, "first": 1}[given]
        sampling = SamplingParams(0.0, length - count, seed=0, ignore_eos=True)
        engine.add(text.token_ids[:count], sampling, str(index))
    while engine.has_work:
        requests = engine.scheduler.running + engine.scheduler.waiting
        known = {each.request_id: len(each.token_ids) for each in requests}
        tokens = {name: texts[int(name)].token_ids[at] for name, at in known.items()}
        look(engine.step(tokens=tokens))


def differences(actual: Tensor, expected: Tensor) -> Tensor:
    """Subtract; what is equal differs by nothing, what is no number by infinity."""
    gaps = (actual.double() - expected.double()).abs().nan_to_num(math.inf, math.inf)
    return torch.where(actual == expected, 0.0, gaps)


def _about(folder: Path, config: ModelConfig, commit: str) -> dict[str, Any]:
    """Say what was compared: model, files and versions."""
    commit = commit or find_commit() or "not given"
    versions = {"lockstep": __version__, "commit": commit}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    # The last two are what transformers computes with where it finds them.
    for name in ("triton", "transformers", "mamba-ssm", "causal-conv1d"):
        versions[name] = "not installed"
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    files: dict[str, str] = {}
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": DEMO if folder == DEMO_FOLDER else folder.resolve().name,
        "family": config.family,
        "layer_pattern": config.layer_pattern,
        "parameters": num_parameters(config),
        "stored_dtype": config.dtype,
        "files": files,
        "versions": versions,
        "date": date.today().isoformat(),
        "factor": LIBRARY_FACTOR,
        "faults": [*_faults(config.family, versions["transformers"])],
    }


def _faults(family: str, release: str) -> Iterator[dict[str, Any]]:
    """Name what is wrong with a family in a release of transformers."""
    number = [int(part) for part in re.findall(r"\d+", release)[:2]]
    for fault in TABLES["faults"]:
        if family in fault["families"] and number < fault.get("mended", [math.inf]):
            yield fault


def find_commit() -> str:
    """Ask git for the commit of the checkout that this is; empty if it is none."""
    root = _HERE.resolve().parents[2]
    done = ""
    # What is installed below a checkout of something else has no commit.
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True).stdout
    return done.strip()


def _name(part: Any) -> str:
    """Name what replaces a component."""
    name = getattr(part, "__qualname__", type(part).__qualname__)
    return part if isinstance(part, str) else f"{part.__module__}:{name}"


def _describe(device: torch.device) -> str:
    """Name a device."""
    is_gpu = device.type == "cuda"
    return (
        torch.cuda.get_device_name(device) if is_gpu else f"CPU, {platform.machine()}"
    )


def _shown(what: str, items: Sequence[T], verbose: bool) -> Iterable[T]:
    """Show a progress bar where somebody watches."""
    if not (verbose and sys.stderr.isatty()):
        return items
    return track(items, what, console=Console(stderr=True), transient=True)
