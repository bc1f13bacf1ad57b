"""An engine follows a recording: the same arrivals, tokens and steps, all compared.

Integers are compared exactly: plans, what was published, outputs, all bookkeeping.
Floats are compared in the classes of whole engines: log-probabilities of every position
that was computed; K/V of every token that is held or cached; states of every running
request, and all that are stored. States that were made in decode are among these: a
state after a token does not say whether a scan over a prompt or updates token by token
have led to it, and these round differently, so no state is held to bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.assemble import build_components
from lockstep.batch import Draws
from lockstep.config import ModelConfig
from lockstep.memory import torch_dtype
from lockstep.plan import RowPlan, StepPlan
from lockstep.reference.sampler import _gumbel_noise
from lockstep.request import Request, RequestOutput, SamplingParams
from lockstep.trace import EngineState, StepRecord
from tests.engines import make_engine
from tests.factories import DEVICE
from tests.matrix import Recording, Taken
from tests.tolerances import (
    MOST_TIES,
    assert_engine_states,
    assert_logprobs,
    logprobs_bound,
)


@dataclass
class Ties:
    """Counts tokens, and those that a class of log-probabilities leaves open.

    A draw takes the largest of some values. Where the two largest are closer than
    rounding may move them, either may be drawn; everywhere else both sides must draw
    the same.

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
        best, second = values.topk(2).values.tolist()
        self.tokens += 1
        if best - second <= 2 * bound:
            self.ties += 1
        else:
            assert drawn == expected, f"token {drawn}, not {expected}, at {position}"

    def report(self, note: Callable[[str, object], None], dtype: str) -> None:
        """Note the counts for the end of the session; in float32 ties must be rare.

        In fewer bits they are not, since the class is wider.
        """
        note(f"tokens of {dtype}", self.tokens)
        note(f"ties of {dtype}", self.ties)
        most = 1 + MOST_TIES * self.tokens if dtype == "float32" else self.tokens
        assert self.ties <= most, f"{self.ties} of {self.tokens} tokens are ties"


@dataclass
class Twin:
    """An engine, what it drew last, and its state before anything was done to it."""

    engine: Any
    drawn: list[int] = field(default_factory=list[int])
    start: EngineState | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return torch_dtype(self.engine.model_config.dtype)

    def begin(self) -> None:
        """Forget everything."""
        assert self.start is not None
        self.engine.reset()
        self.engine.import_state(self.start)


@lru_cache(maxsize=4)
def twin_of(
    config: ModelConfig, graphs: str, options: tuple[tuple[str, Any], ...]
) -> Twin:
    """Build an optimized engine that can be told tokens and shows what it drew."""
    real = build_components("optimized").sample
    twin = Twin(None)

    def sample(logits: Tensor, draws: Draws) -> Tensor:
        token_ids = real(logits, draws)
        twin.drawn = token_ids.tolist()
        return token_ids

    twin.engine = make_engine(
        config,
        "optimized",
        {"sampler.sample": sample},
        DEVICE,
        graphs=graphs,
        debug=("integrity", "poison"),
        **dict(options),
    )
    twin.start = twin.engine.export_state()
    return twin


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
    return records


def _follow_step(
    taken: Taken, recording: Recording, twin: Twin, ties: Ties, planned: bool
) -> StepRecord:
    expected = taken.record

    def truth(row: RowPlan) -> tuple[int, Tensor, SamplingParams]:
        name = row.request_id
        logprobs = expected.logprobs[name][-1]
        return expected.tokens[name], logprobs, recording.sampling[name]

    plan = expected.plan if planned else None
    record = twin.engine.step(plan=plan, tokens=expected.tokens)
    assert_same_step(record, expected, twin.dtype)
    compare_draws(twin, expected.plan, truth, ties)
    assert_same_state(twin.engine.export_state(), taken.state, twin.dtype)
    return record


def assert_same_step(
    record: StepRecord, expected: StepRecord, dtype: torch.dtype
) -> None:
    """Hold a step to the reference's, tokens apart."""
    assert record.step == expected.step
    assert record.plan == expected.plan
    assert record.shape == expected.shape
    assert record.registered_blocks == expected.registered_blocks
    assert record.stored_states == expected.stored_states
    assert not record.failed and not record.interrupted and not record.aborted
    assert [_untimed(each) for each in record.finished] == [
        _untimed(each) for each in expected.finished
    ]
    assert record.host_reads == min(1, len(record.tokens))
    assert set(record.logprobs) == set(expected.logprobs)
    for name, values in expected.logprobs.items():
        try:
            mine = record.logprobs[name].cpu()
            assert_logprobs("optimized", mine, values.cpu(), dtype)
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
    for row, drawn in zip(rows, twin.drawn, strict=False):
        bound = logprobs_bound(twin.dtype)
        ties.compare(drawn, *truth(row), row.end, bound)


def assert_same_state(
    actual: EngineState, expected: EngineState, dtype: torch.dtype
) -> None:
    """Hold all that an engine knows to the reference's."""
    assert _integers(actual) == _integers(expected)
    stored = list(expected.slots.stored.values())
    slots = stored + [each.slot_id for each in expected.running]
    kept = {
        "K/V": lambda caches: caches.kv.flatten(0, 1)[:, _known_tokens(expected)],
        "conv window": lambda caches: caches.conv[:, slots],
        "SSM state": lambda caches: caches.ssm[:, slots],
    }
    for name, select in kept.items():
        mine, theirs = (select(each.caches).cpu() for each in (actual, expected))
        assert_engine_states(dtype, name, mine, theirs)


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


def _known_tokens(state: EngineState) -> Tensor:
    """Mark the places of all tokens that are held or cached, by block and offset."""
    shape = state.caches.kv.shape[2:4]
    is_known = torch.zeros(shape, dtype=torch.bool, device="cpu")
    is_known[list(state.blocks.hashes)] = True
    for request in state.running:
        _mark(is_known, request)
    return is_known


def _mark(is_known: Tensor, request: Request) -> None:
    size = is_known.shape[1]
    for index, block in enumerate(request.block_table):
        is_known[block, : max(0, request.num_computed - index * size)] = True
