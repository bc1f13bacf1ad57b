"""The matrix on which both engines are held together, row by row.

A row is a model, a kind of step, a way to run it, what the cache holds, the length of
prefill slices, and whether a request is preempted. Of all rows that can be, CI runs a
pairwise cover, and a GPU all of them. Each is played by the reference, whose record is
kept; and a row counts only if that record shows what the row is about.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from lockstep.config import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
)
from lockstep.memory import Caches
from lockstep.plan import CacheReport, RowKind, RowPlan, SkipLimit
from lockstep.request import SamplingParams
from lockstep.trace import EngineState, StepRecord
from tests import factories, symbolic
from tests.engines import CPU, greedy, make_engine
from tests.scenarios.common import branch, is_mixed, text

#: Where the optimized engine runs. Unlike ``LOCKSTEP_TEST_DEVICE``, this leaves torch's
#: default alone, as it is for users; with another one, every call takes longer.
DEVICE = torch.device(os.environ.get("LOCKSTEP_MATRIX_DEVICE") or factories.DEVICE)
#: Tokens of a block, of a scan chunk, and taps of the convolution: all different.
BLOCK, SCAN_CHUNK, WIDTH = 32, 16, 4
#: More than any step of a row computes.
ALL = 256
#: Live slots; snapshots come after them.
MAX_REQUESTS = 3

_MAMBA = MambaConfig(
    num_heads=6, head_dim=5, state_size=7, num_groups=2, scan_chunk_size=SCAN_CHUNK
)
_ATTENTION = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=6)
_MOE = MoeConfig(num_experts=6, top_k=2, expert_size=10, shared_size=11)
_HYBRID = ModelConfig(
    family="tiny",
    layer_pattern="M*-M",
    vocab_size=61,
    hidden_size=19,
    max_positions=ALL,
    mamba=_MAMBA,
    attention=_ATTENTION,
    mlp=MlpConfig(size=21),
    moe=_MOE,
)
#: No head count but of K/V is a power of two, and each is shared by three.
MODELS = {
    "attention": replace(_HYBRID, layer_pattern="*-*"),
    "mamba": replace(_HYBRID, layer_pattern="MM"),
    "hybrid": _HYBRID,
    "moe": replace(_HYBRID, layer_pattern="ME*E"),
    "rotary": replace(
        _HYBRID, attention=replace(_ATTENTION, rotary=RotaryConfig(theta=100.0))
    ),
    "limits": replace(
        _HYBRID,
        layer_pattern="M*",
        mamba=replace(_MAMBA, time_step_limit=(0.25, 0.7)),
    ),
}
#: Run by name, with a class of their own. All experts are visited, since with so few
#: digits the choice is often a tie, and other experts give something else altogether.
#: Scores are far apart and experts weigh much, so that a fault in either shows among
#: what rounding does.
_SHORT = replace(_HYBRID, dtype="bfloat16", attention=replace(_ATTENTION, scale=2.0))
SHORT_MODELS = {
    "bf16": _SHORT,
    "bf16 moe": replace(
        _SHORT,
        layer_pattern="ME*E",
        moe=replace(_MOE, top_k=_MOE.num_experts, scaling=3.0),
    ),
}
GRAPHS = ("off", "padded", *(("all",) if DEVICE.type == "cuda" else ()))


@dataclass(frozen=True)
class Row:
    """One row of the matrix; `AXES` has the values of each field.

    Attributes:
        model: One of `MODELS`.
        cache: What the cache holds of the prompts under test.
        chunk: Tokens of a prefill slice.
        phase: In which kind of step the prompts under test are admitted; or that they
            go on to decode together.
        preemption: Whether blocks run out, so that a request is computed anew.
        graphs: How the optimized engine runs steps.
    """

    model: str
    cache: str
    chunk: int
    phase: str
    preemption: bool
    graphs: str

    def __str__(self) -> str:
        """Name the row."""
        chunk = "all" if self.chunk == ALL else self.chunk
        way = "-preemption" if self.preemption else ""
        return f"{self.model}-{self.cache}-{chunk}-{self.phase}{way}-{self.graphs}"

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return (MODELS | SHORT_MODELS)[self.model]

    @property
    def has_states(self) -> bool:
        """Whether there are states to store and restore."""
        return self.config.num_mamba_layers > 0

    @property
    def budget(self) -> int:
        """Tokens of a step: in a mixed one, a request decodes beside the slice."""
        return self.chunk + (self.phase == "mixed")


AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "cache": ("off", "cold", "warm", "full hit", "branch", "second turn", "evicted"),
    "chunk": (
        *(1, 2, WIDTH - 1, WIDTH),
        *(SCAN_CHUNK - 1, SCAN_CHUNK, SCAN_CHUNK + 1, BLOCK, ALL),
    ),
    "phase": ("prefill", "decode", "mixed"),
    "preemption": (False, True),
    "graphs": GRAPHS,
}


def why_impossible(row: Row) -> str:
    """Say why a row cannot be; empty if it can."""
    if row.cache == "evicted" and not row.has_states:
        return "there is no state to evict"
    if row.preemption and row.budget == 1:
        return "a step of one token has no room for a second request to preempt"
    if row.cache == "full hit" and not row.has_states and row.phase == "mixed":
        if row.chunk > 1:
            return "K/V of a whole prompt leaves one token to compute, not a slice"
    return ""


@cache
def all_rows(models: tuple[str, ...] = tuple(MODELS)) -> list[Row]:
    """List every row that can be; those that differ in graphs alone are neighbours."""
    assert list(AXES) == [entry.name for entry in fields(Row)]
    values: Any = AXES | {"model": models}
    rows = [Row(*each) for each in product(*values.values())]
    return [row for row in rows if not why_impossible(row)]


@cache
def cover(strength: int) -> list[Row]:
    """Choose few rows in which so many values meet as meet in any row at all.

    Each is run in every way, since the reference's part is the same.

    Greedy: the row next chosen has the most new meetings. What a row adds only falls
    while others are chosen, so an old number that is beaten by none is looked at first.

    Args:
        strength: 2 for all pairs of values, 3 for all triples.
    """
    rows = [row for row in all_rows() if row.graphs == GRAPHS[0]]
    meetings = [_meetings(row, strength) for row in rows]
    met, chosen = set[Any](), list[int]()
    queue = [(-len(each), index) for index, each in enumerate(meetings)]
    heapq.heapify(queue)
    while queue:
        index = queue[0][1]
        gain = len(meetings[index] - met)
        if not gain:
            heapq.heappop(queue)
        elif gain < -queue[0][0]:
            heapq.heapreplace(queue, (-gain, index))
        else:
            met |= meetings[index]
            chosen.append(index)
    kept = [rows[index] for index in sorted(chosen)]
    return [replace(row, graphs=graphs) for row in kept for graphs in GRAPHS]


def _meetings(row: Row, strength: int) -> set[Any]:
    values = [(name, getattr(row, name)) for name in AXES]
    return set(combinations(values, strength))


def shard(rows: Sequence[Row], which: str) -> list[Row]:
    """Take the rows of one shard, ``i/n`` with ``i`` from 0, neighbours together."""
    index, count = map(int, which.split("/"))
    assert 0 <= index < count, f"shard {which} is not one of {count}"
    return list(rows[index * len(rows) // count : (index + 1) * len(rows) // count])


# What the reference did.


@dataclass(frozen=True)
class Arrival:
    """A request was added."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class Taken:
    """A step was taken: what it did, and what the engine knew then."""

    record: StepRecord
    state: EngineState


@dataclass
class Recording:
    """Everything that was done to an engine, so that it can be done to another.

    Attributes:
        operations: In order.
        tokens: Tokens of each request, generated ones included.
        sampling: Sampling parameters of each request.
        mark: Steps before the requests under test arrived.
    """

    operations: list[Arrival | Taken] = field(default_factory=list[Arrival | Taken])
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    sampling: dict[str, SamplingParams] = field(
        default_factory=dict[str, SamplingParams]
    )
    mark: int = 0

    @property
    def records(self) -> list[StepRecord]:
        """Records of all steps."""
        return [each.record for each in self.operations if isinstance(each, Taken)]

    def rows_of(self, request_id: str) -> list[tuple[StepRecord, RowPlan]]:
        """List a request's rows, with the steps that they are of."""
        pairs = [(record, row) for record in self.records for row in record.rows]
        return [pair for pair in pairs if pair[1].request_id == request_id]


class Recorder:
    """Does things to an engine and records them."""

    def __init__(self, engine: Any) -> None:
        """Begin with an engine to which nothing was done."""
        self.engine = engine
        self.recording = Recording()

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Add a request; its tokens are cut down to the vocabulary."""
        tokens = [token % self.engine.model_config.vocab_size for token in prompt]
        self.engine.add(tokens, sampling, name)
        self.recording.operations.append(Arrival(name, tokens, sampling))
        self.recording.tokens[name] = list(tokens)
        self.recording.sampling[name] = sampling

    def step(self) -> StepRecord:
        """Take one step."""
        record = self.engine.step()
        # A step that fails is tried again, for ever if there is nobody to blame.
        assert not record.interrupted and not record.failed, str(record.failed)
        record, state, _ = to_host(record, self.engine.export_state())
        self.recording.operations.append(Taken(record, state))
        for name, token in record.tokens.items():
            self.recording.tokens[name].append(token)
        return record

    def drain(self) -> None:
        """Take steps until nothing is left to do."""
        while self.engine.has_work:
            self.step()


def to_host(
    record: StepRecord, state: EngineState, *others: Tensor
) -> tuple[StepRecord, EngineState, list[Tensor]]:
    """Bring what a step gave and left behind to the CPU, all in one transfer."""
    logprobs = record.logprobs
    values = iter(fetch([*state.caches.tensors(), *logprobs.values(), *others]))
    caches = Caches(next(values), next(values), next(values))
    fetched = dict(zip(logprobs, values, strict=False))
    return (
        replace(record, logprobs=fetched),
        replace(state, caches=caches),
        list(values),
    )


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the CPU at once; those that are there stay."""
    is_there = all(tensor.device == CPU for tensor in tensors)
    return list(tensors) if is_there else fetch_packed(tensors)


def fetch_packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of any dtypes to the CPU as one string of bytes."""
    flat = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    parts = torch.cat(flat).cpu().split([len(each) for each in flat])
    # Each in memory of its own, since a view must begin at a multiple of its items.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def default_device(device: torch.device) -> AbstractContextManager[object]:
    """Let tensors be made there; without torch's slow way where they are anyway."""
    return nullcontext() if torch.get_default_device() == device else device


# What a row is played with.


#: Sizes in which every row fits.
LARGEST: dict[str, Any] = {
    "max_requests": MAX_REQUESTS,
    "max_tokens_per_step": ALL + 1,
    "block_size": BLOCK,
    "num_blocks": 32,
    "snapshot_slots": 8,
    "prefix_caching": True,
}


@lru_cache(maxsize=4)
def recorded(row: Row) -> Recording:
    """Play a row on the reference; its way to run graphs plays no part.

    Float32 is played on the CPU, where the reference is fastest; in fewer bits another
    device's products would differ by more than the sides do.
    """
    assert row.graphs == "off"
    device = CPU if row.config.dtype == "float32" else DEVICE
    sizes = options(row)
    with default_device(device):
        engine = make_engine(row.config, debug=(), device=device, **sizes)
        return play(row, engine)


def options(row: Row) -> dict[str, Any]:
    """Return the sizes of a row's engines."""
    enough = LARGEST["num_blocks"]
    return _options(row, _num_blocks(row) if row.preemption else enough)


def _options(row: Row, num_blocks: int) -> dict[str, Any]:
    return LARGEST | {
        "max_tokens_per_step": row.budget,
        "num_blocks": num_blocks,
        "snapshot_slots": 1 if row.cache == "evicted" else LARGEST["snapshot_slots"],
        "prefix_caching": row.cache != "off",
    }


@cache
def _num_blocks(row: Row) -> int:
    """Find the most blocks with which a row still runs out of them.

    From a play with plenty and without arithmetic; whether it was enough for all else
    that the row is about, its events say.
    """
    row = replace(row, graphs="off")
    pattern = "".join(kind for kind in "M*" if kind in row.config.layer_pattern)
    parts = {"model.Model": symbolic.SymbolicModel}
    config = symbolic.model_config(pattern)
    with default_device(CPU):
        engine = make_engine(config, components=parts, debug=(), **_options(row, 64))
        records = play(row, engine).records
    held: dict[str, set[int]] = {}
    most = 0
    for record in records:
        held |= {each.request_id: set(each.block_table) for each in record.rows}
        if not any(each.cache is not None for each in record.rows):
            # Where an admission took the last block, the next would only wait.
            most = max(most, len(set[int]().union(*held.values())))
        for output in record.finished:
            del held[output.request_id]
    return most - 1


def play(row: Row, engine: Any) -> Recording:
    """Fill the cache as a row wants it, then serve two requests that find it so.

    In a mixed row, a third request decodes when they come.
    """
    recorder = Recorder(engine)
    prompts = _SCENES[row.cache](recorder)
    recorder.recording.mark = len(recorder.recording.records)
    if row.phase == "mixed":
        recorder.add("beside", text(3, 99), greedy(6))
        while not recorder.step().tokens:
            pass
    # One is greedy, the other drawn at random.
    for name, prompt, count in zip("uv", prompts, _lengths(row, prompts), strict=True):
        draw = {"temperature": 0.7, "seed": 5} if name == "v" else {}
        recorder.add(name, prompt, greedy(count, **draw))
    recorder.drain()
    return recorder.recording


def _lengths(row: Row, prompts: tuple[list[int], list[int]]) -> tuple[int, int]:
    """Say how many tokens both requests generate.

    Where both are to decode at once, the first waits for the second one's prompt, which
    gets what decoding leaves of each step. Both complete a block; under preemption the
    first is still there when the second does.
    """
    if row.phase != "decode" and not row.preemption:
        return (1, 1) if row.phase == "prefill" else (5, 5)
    first, second = (-len(prompt) % BLOCK or BLOCK for prompt in prompts)
    if row.budget == 1:
        return first + 3, second + 3
    waits = -(-(len(prompts[1]) - _skipped(row)) // (row.budget - 1))
    first = waits + second + 6 if row.preemption else max(first, waits) + 3
    return first, second + 10


def _skipped(row: Row) -> int:
    """Say how many tokens the requests under test skip."""
    if row.cache in ("off", "cold", "evicted"):
        return 0
    is_whole = row.cache == "full hit" and not row.has_states
    return 2 * BLOCK - 1 if is_whole else BLOCK


def _cold(recorder: Recorder) -> tuple[list[int], list[int]]:
    return text(2 * BLOCK - 3, 1), text(2 * BLOCK - 5, 2)


def _warm(recorder: Recorder) -> tuple[list[int], list[int]]:
    """Both begin with all that is cached of another, earlier prompt."""
    seed = text(BLOCK + 5)
    _serve(recorder, "seed", seed)
    return _branches(seed[:BLOCK])


def _full_hit(recorder: Recorder) -> tuple[list[int], list[int]]:
    """Both are an earlier prompt again, whose blocks are all complete.

    One more is shorter than any shape, all of which these could fill exactly.
    """
    seed = text(2 * BLOCK)
    _serve(recorder, "seed", seed)
    _serve(recorder, "other", text(5, 9))
    return seed, seed


def _branch(recorder: Recorder) -> tuple[list[int], list[int]]:
    """Both leave an earlier prompt where another has left it before."""
    seed = text(2 * BLOCK + 5)
    _serve(recorder, "seed", seed)
    _serve(recorder, "sibling", branch(seed[:BLOCK], BLOCK + 9, 7))
    return _branches(seed[:BLOCK])


def _second_turn(recorder: Recorder) -> tuple[list[int], list[int]]:
    """Both go on with an earlier prompt and what was generated for it."""
    _serve(recorder, "seed", text(BLOCK - 4), 8)
    return _branches(recorder.recording.tokens["seed"])


def _evicted(recorder: Recorder) -> tuple[list[int], list[int]]:
    """Both begin with an earlier prompt whose state gave way to another one's."""
    seed = text(BLOCK + 5)
    _serve(recorder, "seed", seed)
    _serve(recorder, "other", text(BLOCK + 5, 9))
    return _branches(seed[:BLOCK])


_SCENES = {
    "off": _cold,
    "cold": _cold,
    "warm": _warm,
    "full hit": _full_hit,
    "branch": _branch,
    "second turn": _second_turn,
    "evicted": _evicted,
}


def _serve(
    recorder: Recorder, name: str, prompt: Sequence[int], count: int = 1
) -> None:
    recorder.add(name, prompt, greedy(count))
    recorder.drain()


def _branches(stem: Sequence[int]) -> tuple[list[int], list[int]]:
    """Let two prompts leave a stem; each completes a block more and nearly another."""
    return branch(stem, 3 * BLOCK - 3, 1), branch(stem, 3 * BLOCK - 5, 2)


# What has to happen in a row.


def expected_events(row: Row) -> set[str]:
    """Name what must be seen, or the row is not about what it says."""
    events = {f"cache: {row.cache}", f"phase: {row.phase}", "slices as asked for"}
    if row.preemption:
        events |= {"preempted", "computed anew"}
    if row.has_states and row.cache != "off":
        # A prompt that is known whole has left all its states before.
        events |= set[str]() if row.cache == "full hit" else {"state stored"}
        if row.cache not in ("cold", "evicted"):
            events |= {"restored"}
        if row.phase == "decode":
            events |= {"state stored in decode"}
    if row.phase == "decode" and row.budget > 1 and not row.preemption:
        # A request that was preempted comes back when the other is gone.
        events |= {"row moved"}
    return events


def seen_events(row: Row, recording: Recording) -> set[str]:
    """Name what was seen."""
    return set(_events(row, recording))


def _events(row: Row, recording: Recording) -> Iterator[str]:
    came, first = next(p for p in recording.rows_of("u") if p[1].cache is not None)
    assert first.cache is not None
    later = recording.records[recording.mark :]
    if _shows_cache(row, recording, first, first.cache):
        yield f"cache: {row.cache}"
    if _shows_phase(row, came, later):
        yield f"phase: {row.phase}"
    # What is cached may leave no whole slice, but was computed in slices itself; beside
    # a request that decodes, only what came to it counts.
    sliced = later if row.phase == "mixed" else recording.records
    if any(_is_slice(row, each) for record in sliced for each in record.rows):
        yield "slices as asked for"
    if first.start and first.initial_slot_id >= MAX_REQUESTS:
        yield "restored"
    for record in later:
        kinds = {each.kind for each in record.rows if each.snapshots}
        yield from ["state stored"] if RowKind.PREFILL in kinds else []
        yield from ["state stored in decode"] if RowKind.DECODE in kinds else []
        for name in record.plan.preempted:
            yield "preempted"
            if _is_computed_anew(recording, name):
                yield "computed anew"
    if _has_move(later):
        yield "row moved"


def _shows_cache(
    row: Row, recording: Recording, first: RowPlan, report: CacheReport
) -> bool:
    """Tell whether the first request under test found what it was to find."""
    matched, skipped = report.matched_kv_tokens, report.num_skipped_tokens
    length = len(next(a for a in _arrivals(recording) if a.request_id == "u").prompt)
    before = recording.records[: recording.mark]
    evicted = [
        key
        for record in before
        for key in record.plan.evicted_states
        if key not in record.plan.evicted_blocks
    ]
    registered = [each for each in recording.records if each.registered_blocks]
    return {
        "off": report.limit is SkipLimit.CACHING_OFF and not registered,
        "cold": report.limit is SkipLimit.NO_MATCH and bool(registered),
        "warm": matched == skipped == BLOCK == first.start,
        "full hit": matched == length > skipped > 0,
        "branch": matched == skipped == BLOCK == first.start,
        "second turn": bool(skipped) and _is_generated(recording, skipped),
        "evicted": bool(evicted) and matched == BLOCK > skipped,
    }[row.cache]


def _is_generated(recording: Recording, position: int) -> bool:
    """Tell whether a position of the seed, if there is one, is behind its prompt."""
    prompts = {each.request_id: each.prompt for each in _arrivals(recording)}
    if "seed" not in prompts:
        return False
    return len(prompts["seed"]) < position < len(recording.tokens["seed"])


def _shows_phase(row: Row, came: StepRecord, later: Iterable[StepRecord]) -> bool:
    if row.phase == "decode":
        counts = [
            record.shape.decode_requests
            for record in later
            if not record.shape.prefill_requests
        ]
        return max(counts, default=0) >= min(2, row.budget)
    return is_mixed(came) == (row.phase == "mixed")


def _is_slice(row: Row, each: RowPlan) -> bool:
    """Tell whether a prefill row is as long as slices are to be."""
    if each.kind is not RowKind.PREFILL:
        return False
    if row.chunk == ALL:
        return each.cache is not None and each.samples
    return each.num_tokens == row.chunk


def _is_computed_anew(recording: Recording, name: str) -> bool:
    """Tell whether a request was admitted more than once."""
    admissions = [each for _, each in recording.rows_of(name) if each.cache is not None]
    return len(admissions) > 1


def _has_move(records: Sequence[StepRecord]) -> bool:
    """Tell whether a decoding request had another place a step before."""
    places: dict[str, int] = {}
    for record in records:
        now = {
            each.request_id: index
            for index, each in enumerate(record.rows)
            if each.kind is RowKind.DECODE
        }
        if any(places.get(name, place) != place for name, place in now.items()):
            return True
        places = now
    return False


def _arrivals(recording: Recording) -> list[Arrival]:
    return [each for each in recording.operations if isinstance(each, Arrival)]
