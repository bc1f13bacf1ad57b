"""An engine follows a recording: the same arrivals, tokens and steps, all compared.

Integers are compared exactly: plans, what was published, outputs, all bookkeeping.
Floats are compared in the classes of whole engines: log-probabilities of every position
that was computed; K/V of every token that is held or cached; states of every running
request, and all that are stored. States that were made in decode are among these: a
state after a token does not say whether a scan over a prompt or updates token by token
have led to it, and these round differently, so no state is held to bits.

An engine on a GPU is read once a step besides what it reads itself: all that is to be
compared comes to the CPU in one transfer, and only content newly free is poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.assemble import build_components, settle_options
from lockstep.batch import Draws
from lockstep.config import EngineConfig, ModelConfig, Sizes
from lockstep.debug import poison
from lockstep.memory import Caches, torch_dtype
from lockstep.plan import RowKind, RowPlan, StepPlan
from lockstep.reference.sampler import _gumbel_noise
from lockstep.request import Request, RequestOutput, SamplingParams
from lockstep.trace import EngineState, StepRecord
from tests.engines import CPU, make_engine
from tests.matrix import (
    DEVICE,
    LARGEST,
    Recording,
    Taken,
    default_device,
    to_host,
)
from tests.tolerances import (
    MOST_TIES,
    assert_engine_states,
    assert_logprobs,
    assert_spread,
    logprobs_bound,
)


@dataclass
class Ties:
    """Counts tokens, and those that a class of log-probabilities leaves open.

    A draw takes the largest of some values. Where the two largest are closer than
    rounding may move them, any of those so close may be drawn; everywhere else both
    sides must draw the same.

    Attributes:
        tokens: Tokens compared.
        ties: Those that may differ.
    """

    tokens: int = 0
    ties: int = 0

    def compare(
        self,
        drawn: int,
        expected: int,
        logprobs: Tensor,
        sampling: SamplingParams,
        position: int,
        bound: float,
    ) -> None:
        """Hold a token to the reference's, unless that was a tie.

        Args:
            drawn: The token drawn.
            expected: The reference's.
            logprobs: The reference's log-probabilities, from which it was drawn.
            sampling: How it was drawn; filters are not looked at.
            position: Where it stands.
            bound: How far a log-probability may be off.
        """
        values = logprobs
        if sampling.temperature > 0:
            bound /= sampling.temperature
            noise = _gumbel_noise(
                len(values), sampling.seed or 0, position, values.device
            )
            values = values / sampling.temperature + noise
        is_near = values >= values.max() - 2 * bound
        self.tokens += 1
        if int(is_near.sum()) > 1:
            self.ties += 1
            is_right = bool(is_near[drawn])
        else:
            is_right = drawn == expected
        assert is_right, f"token {drawn}, not {expected}, at {position}"

    def report(self, note: Callable[[str, object], None], dtype: str) -> None:
        """Note the counts for the end of the session; in float32 ties must be rare.

        In fewer bits they are not, since the class is wider.
        """
        note(f"tokens of {dtype}", self.tokens)
        note(f"ties of {dtype}", self.ties)
        most = 1 + MOST_TIES * self.tokens if dtype == "float32" else self.tokens
        assert self.ties <= most, f"{self.ties} of {self.tokens} tokens are ties"


@dataclass(frozen=True)
class Unowned:
    """Blocks and slots that nobody owns and nothing may write, padding neither."""

    blocks: frozenset[int] = frozenset()
    slots: frozenset[int] = frozenset()

    def __and__(self, other: Unowned) -> Unowned:
        """Take what is in both."""
        return Unowned(self.blocks & other.blocks, self.slots & other.slots)

    def __sub__(self, other: Unowned) -> Unowned:
        """Leave out what is in the other."""
        return Unowned(self.blocks - other.blocks, self.slots - other.slots)


class Twin:
    """An optimized engine that can be told tokens and shows what it drew.

    Attributes:
        engine: The engine.
        largest: The sizes that it was built with.
        is_rounded: Whether its kernels round what they multiply.
        drawn: Tokens drawn last, those of padding included.
        start: Its state before anything was done to it.
        unowned: What nobody owned after the last step; it holds NaN.
    """

    def __init__(
        self, config: ModelConfig, graphs: str, device: torch.device, **options: Any
    ) -> None:
        """Build the engine."""
        asked = EngineConfig(kernels=options.get("kernels"))
        kernels = str(settle_options(asked, "optimized", device).kernels)
        self.is_rounded = config.dtype != "float32" and kernels != "torch"
        real = build_components("optimized", kernels=kernels).sample
        self._drawn = self.drawn = torch.empty(0, dtype=torch.int64, device=device)
        self.unowned = Unowned()

        def sample(logits: Tensor, draws: Draws) -> Tensor:
            self._drawn = real(logits, draws)
            return self._drawn

        # Integrity checks read from the device; there they come after the last step.
        checks = () if device.type == "cuda" else ("integrity",)
        self.engine = make_engine(
            config,
            "optimized",
            {"sampler.sample": sample},
            device,
            graphs=graphs,
            **{"debug": checks} | options,
        )
        self.largest: Sizes = self.engine.sizes
        self._empty()

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return torch_dtype(self.engine.model_config.dtype)

    def resize(self, **options: Any) -> None:
        """Give the engine smaller sizes, as if it had been built with them.

        Bookkeeping is made anew; memory and graphs, which take long, stay. Zero slot
        and dummies of padding keep their places behind all that the engine then owns.
        """
        engine, parts = self.engine, self.engine.components
        names = ("max_tokens_per_step", "num_blocks", "snapshot_slots")
        changes = {name: options[name] for name in names}
        assert all(n <= getattr(self.largest, name) for name, n in changes.items())
        kept = {name: n for name, n in options.items() if name not in names}
        assert all(getattr(self.largest, name, n) == n for name, n in kept.items())
        engine.engine_config = config = replace(engine.engine_config, **options)
        engine.sizes = sizes = replace(self.largest, **changes)
        engine.blocks = parts.BlockPool(sizes.num_blocks, config.eviction)
        engine.slots = parts.StateSlots(sizes.max_requests, sizes.snapshot_slots)
        engine.cache = parts.PrefixCache(
            engine.blocks,
            engine.slots,
            sizes,
            engine.model_config.num_mamba_layers > 0,
            config.prefix_caching,
        )
        engine.scheduler = parts.Scheduler(sizes, engine.cache)
        engine.arrivals = 0
        self._empty()

    def _empty(self) -> None:
        """Fill memory with NaN, except where fresh requests and padding start from."""
        caches, sizes, largest = self.engine.caches, self.engine.sizes, self.largest
        for pool in caches.tensors():
            pool.fill_(torch.nan)
        caches.kv[:, :, largest.dummy_block] = 0
        for slot in (sizes.zero_slot, largest.zero_slot, largest.dummy_slot):
            caches.conv[:, slot] = 0
            caches.ssm[:, slot] = 0
        self.start = self.engine.export_state()

    def begin(self) -> None:
        """Forget everything."""
        self.engine.reset()
        self.engine.import_state(self.start)
        self.unowned = self._list_unowned()

    def step(self, **given: Any) -> tuple[StepRecord, EngineState]:
        """Take a step; bring what it gave and what the engine then knows to the CPU.

        What nobody owned before and after must not have changed.
        """
        self._drawn = self._drawn[:0]
        record = self.engine.step(**given)
        assert not record.interrupted and not record.failed, str(record.failed)
        taken = to_host(record, _look_at(self.engine), self._drawn)
        record, state, (self.drawn,) = taken
        self._check_memory(record, state.caches)
        return record, state

    def _check_memory(self, record: StepRecord, caches: Caches) -> None:
        """Look for writes to what no row owns, then poison what is newly free."""
        now, used = self._list_unowned(), _used(record)
        idle = self.unowned & now - used
        blocks, slots = list(idle.blocks), list(idle.slots)
        kept = caches.kv[:, :, blocks], caches.conv[:, slots], caches.ssm[:, slots]
        for name, pool in zip(("blocks", "conv windows", "states"), kept, strict=True):
            is_written = f"step {record.step} wrote {name} that nobody owns"
            assert bool(pool.isnan().all()), is_written
        # Rows of padding start from that of the sizes that the engine was built with.
        zeros = [self.engine.sizes.zero_slot, self.largest.zero_slot]
        for pool in (caches.conv, caches.ssm):
            assert not pool[:, zeros].any(), f"step {record.step} wrote the zero slot"
        freed = now - idle
        if freed != Unowned():
            poison(self.engine.caches, list(freed.blocks), list(freed.slots))
        self.unowned = now

    def _list_unowned(self) -> Unowned:
        """List what is free, and what is behind the sizes that the engine was given."""
        sizes, largest = self.engine.sizes, self.largest
        slots = self.engine.slots.export_state()
        beyond = set(range(sizes.dummy_slot, largest.zero_slot))
        return Unowned(
            frozenset(self.engine.blocks.export_state().free)
            | set(range(sizes.num_blocks, largest.num_blocks)),
            frozenset(slots.free_live + slots.free_snapshots) | beyond,
        )


def _used(record: StepRecord) -> Unowned:
    """List the blocks and slots of a step's rows, some of which ended with it."""
    rows = record.rows
    targets = [snapshot.slot_id for row in rows for snapshot in row.snapshots]
    return Unowned(
        frozenset(block for row in rows for block in row.block_table),
        frozenset([*(row.slot_id for row in rows), *targets]),
    )


def _look_at(engine: Any) -> EngineState:
    """Return what an engine knows, without copies: until its next step."""
    return EngineState(
        step=engine.scheduler.step,
        arrivals=engine.arrivals,
        admissions=engine.scheduler.admissions,
        waiting=engine.scheduler.waiting,
        running=engine.scheduler.running,
        blocks=engine.blocks.export_state(),
        slots=engine.slots.export_state(),
        caches=engine.caches,
    )


@lru_cache(maxsize=4)
def twin_of(
    config: ModelConfig,
    graphs: str,
    options: tuple[tuple[str, Any], ...],
    device: torch.device = DEVICE,
) -> Twin:
    """Build a twin, or take one that was built lately."""
    return Twin(config, graphs, device, **dict(options))


@lru_cache(maxsize=6)
def warm_twin(config: ModelConfig, graphs: str) -> Twin:
    """Build a twin in which every row of the matrix fits, to be resized."""
    return Twin(config, graphs, DEVICE, **LARGEST)


def follow(
    recording: Recording, twin: Twin, ties: Ties, planned: bool
) -> list[StepRecord]:
    """Let an engine do all that a recording has, and compare after each step.

    Args:
        recording: What the reference did.
        twin: The engine.
        ties: Counts tokens.
        planned: Whether recorded plans are imposed; if not, the engine's own must be
            the same.

    Returns:
        The engine's records.
    """
    twin.begin()
    records: list[StepRecord] = []
    for operation in recording.operations:
        if isinstance(operation, Taken):
            records.append(_follow_step(operation, recording, twin, ties, planned))
        else:
            twin.engine.add(operation.prompt, operation.sampling, operation.request_id)
    assert not twin.engine.has_work
    twin.engine.check_integrity()
    if twin.is_rounded:
        assert_same_on_the_whole(records, recording.records, twin.dtype)
    return records


def assert_same_on_the_whole(
    records: Sequence[StepRecord], expected: Sequence[StepRecord], dtype: torch.dtype
) -> None:
    """Hold log-probabilities of all steps together to the reference's.

    Those of decode by themselves, since most positions of a run are of prefill.
    """
    for kind in RowKind:
        pairs = [
            (mine.logprobs[row.request_id], theirs.logprobs[row.request_id])
            for mine, theirs in zip(records, expected, strict=True)
            for row in theirs.rows
            if row.kind is kind
        ]
        if pairs:
            actual, exact = map(torch.cat, zip(*pairs, strict=True))
            assert_spread(dtype, kind, actual, exact)


def _follow_step(
    taken: Taken, recording: Recording, twin: Twin, ties: Ties, planned: bool
) -> StepRecord:
    expected = taken.record

    def truth(row: RowPlan) -> tuple[int, Tensor, SamplingParams]:
        name = row.request_id
        logprobs = expected.logprobs[name][-1]
        return expected.tokens[name], logprobs, recording.sampling[name]

    plan = expected.plan if planned else None
    record, state = twin.step(plan=plan, tokens=expected.tokens)
    with default_device(CPU):
        assert_same_step(record, expected, twin)
        compare_draws(twin, expected.plan, truth, ties)
        assert_same_state(state, taken.state, twin)
    return record


def assert_same_step(record: StepRecord, expected: StepRecord, twin: Twin) -> None:
    """Hold an engine's step to the reference's, tokens apart."""
    assert record.step == expected.step
    assert record.plan == expected.plan
    assert record.shape == expected.shape
    assert record.registered_blocks == expected.registered_blocks
    assert record.stored_states == expected.stored_states
    assert not record.aborted
    assert [_untimed(each) for each in record.finished] == [
        _untimed(each) for each in expected.finished
    ]
    assert record.host_reads == min(1, len(record.tokens))
    assert set(record.logprobs) == set(expected.logprobs)
    exactness = {"is_rounded": twin.is_rounded}
    for name, values in expected.logprobs.items():
        mine = record.logprobs[name]
        try:
            assert_logprobs("optimized", mine, values, twin.dtype, **exactness)
        except AssertionError as error:
            raise AssertionError(f"step {record.step}, {name}: {error}") from error


def compare_draws(
    twin: Twin,
    plan: StepPlan,
    truth: Callable[[RowPlan], tuple[int, Tensor, SamplingParams]],
    ties: Ties,
) -> None:
    """Hold what an engine drew in a step to what it should have.

    Args:
        twin: The engine, after the step.
        plan: The step's plan.
        truth: For a row the token to be drawn, from what, and how.
        ties: Counts tokens.
    """
    rows = [row for row in plan.decode_rows + plan.prefill_rows if row.samples]
    # Padded draws come behind the real ones.
    drawn_tokens = twin.drawn.tolist()[: len(rows)]
    for row, drawn in zip(rows, drawn_tokens, strict=True):
        bound = logprobs_bound(twin.dtype, is_rounded=twin.is_rounded)
        ties.compare(drawn, *truth(row), row.end, bound)


def assert_same_state(actual: EngineState, expected: EngineState, twin: Twin) -> None:
    """Hold all that an engine knows to the reference's."""
    assert _integers(actual) == _integers(expected)
    stored = list(expected.slots.stored.values())
    slots = stored + [each.slot_id for each in expected.running]
    tokens = _known_tokens(expected)
    kept = {
        "K/V": lambda caches: caches.kv.flatten(0, 1)[:, *tokens],
        "conv window": lambda caches: caches.conv[:, slots],
        "SSM state": lambda caches: caches.ssm[:, slots],
    }
    for name, select in kept.items():
        mine, theirs = (select(each.caches) for each in (actual, expected))
        assert_engine_states(twin.dtype, name, mine, theirs, twin.is_rounded)


def _integers(state: EngineState) -> tuple[Any, ...]:
    """Return everything but floats and times."""
    requests = [
        [replace(each, timings=None) for each in group]  # type: ignore[arg-type]
        for group in (state.waiting, state.running)
    ]
    counts = (state.step, state.arrivals, state.admissions)
    return (*counts, *requests, state.blocks, state.slots)


def _untimed(output: RequestOutput) -> RequestOutput:
    return replace(output, timings=None)  # type: ignore[arg-type]


def _known_tokens(state: EngineState) -> tuple[Tensor, Tensor]:
    """Find all tokens that are held or cached: their blocks, and offsets in these."""
    shape = state.caches.kv.shape[2:4]
    is_known = torch.zeros(shape, dtype=torch.bool, device=CPU)
    is_known[list(state.blocks.hashes)] = True
    for request in state.running:
        _mark(is_known, request)
    blocks, offsets = is_known.nonzero(as_tuple=True)
    return blocks, offsets


def _mark(is_known: Tensor, request: Request) -> None:
    size = is_known.shape[1]
    for index, block in enumerate(request.block_table):
        is_known[block, : max(0, request.num_computed - index * size)] = True
