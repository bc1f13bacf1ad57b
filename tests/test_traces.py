"""Random traces: whatever happens, every request gets what it would get alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .conftest import SIDES
from .trace_events import EVENTS
from .traces import (
    BLOCK,
    FAULTS,
    PHASES,
    AbortInStep,
    Add,
    Fail,
    Player,
    RealModel,
    Step,
    Symbols,
    Trace,
    Turn,
    assert_same_record,
    chats,
    failing,
    replayed,
    second_engine,
    traces,
)
from .witness import model_config

#: The side under test is that of the whole engine.
MODULE = "engine"

#: Examples of a test that costs a second each.
EXAMPLES = settings().max_examples

#: For events too rare for a short search, a trace each that is sure to meet it.
DIRECTED = {
    "evicted block owned a snapshot": Trace(
        (Add((0, 0)), Step(9), Add((1, 1, 1))), num_blocks=4
    ),
    "restore and extraction in one step": Trace(
        (Add((0, 0)), Step(9), Add((0, 0, 1), 1))
    ),
    "preemption mid-prompt": Trace(
        (Add((0,), 0, 40), Add((1, 1, 1), 0, 2)),
        max_requests=2,
        max_tokens_per_step=2,
        num_blocks=6,
    ),
    "preemption in decode": Trace(
        (Add((0,), 0, 24), Add((1,), 0, 24)), max_requests=2, num_blocks=4
    ),
    "two rows want one snapshot": Trace(
        (Add((0, 0, 0), 0, 1), Step(2), Add((0, 0), 1, 2), Add((0, 0), 2, 2)),
        max_tokens_per_step=200,
        snapshot_slots=1,
    ),
    "pool exactly full with a partial hit": Trace(
        (Add((0, 0)), Step(9), Add((0, 1, 1), 1, 1)), num_blocks=4
    ),
    "row moved in a snapshot step": Trace(
        (Add((0,), 0, 17), Add((1,), 0, 20)), max_requests=2
    ),
    "deferred request loses its donor": Trace(
        (Add((0, 0, 0), 1), Add((0, 0, 0), 2), AbortInStep(1, "forward"))
    ),
    "state evicted, K/V kept": Trace(
        (Add((0, 0)), Step(9), Add((1, 1)), Step(9), Add((0, 0, 0))), snapshot_slots=1
    ),
    "whole prompt cached": Trace((Add((0, 0), 0), Step(9), Add((0, 0), 0))),
    "twin of a cached block": Trace((Add((0,), 8, 24), Add((0,), 8, 24))),
    "decode restored by a second turn": Trace((Add((0,), 8, 24), Step(30), Turn())),
}
#: A block is evicted, and in the same step a request preempted: one before the other.
EVICTION_THEN_PREEMPTION = Trace(
    (
        *(Add((1,), 0, 1), Step(2)),
        *(Add((0,), 0), Add((2,), 0), Add((3, 0, 0, 0, 0, 0), 0)),
    ),
    max_tokens_per_step=40,
    num_blocks=9,
)
#: An abort in each phase of the step that restores a state, alone and beside another.
ABORTED_RESTORES = [
    Trace((Add((0, 0)), Step(9), *others, Add((0, 0), 2), AbortInStep(0, phase)))
    for phase in PHASES
    for others in ((), (Add((0, 0), 3), Add((1,), 3)))
]


def directed(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on every directed trace before any random one."""
    for trace in (*DIRECTED.values(), *ABORTED_RESTORES, EVICTION_THEN_PREEMPTION):
        test = example(trace)(test)
    return test


def assert_all_met(counts: Counter[str], side: str) -> None:
    """Check that no event was missed, and print how often each was met."""
    # Reports of prompts and bans may want more room than a padded step has.
    usual = counts[f"{'padded' if side == 'padded' else 'eager'} step"]
    assert usual > 0.8 * (counts["padded step"] + counts["eager step"])
    print("\n".join(f"{counts[name]:8d}  {name}" for name in EVENTS))
    assert [name for name in EVENTS if not counts[name]] == []


@pytest.mark.parametrize("name", sorted(DIRECTED))
def test_directed_trace_meets_its_event(side: str, name: str) -> None:
    """So that the counts below do not hang on chance."""
    assert Player(DIRECTED[name], Symbols(side), side).play().events[name]


def test_tokens_in_disguise(side: str) -> None:
    """Many traces, with a model that shows every wrong read and costs nothing."""
    play_symbols(side, 20 * EXAMPLES)


def test_tokens_in_disguise_at_padded_shapes() -> None:
    """Padding is read by no row, and writes to nobody's memory."""
    play_symbols("padded", 2 * EXAMPLES)


def play_symbols(side: str, examples: int) -> None:
    """Play traces without arithmetic and count what they meet."""
    model = Symbols(side)
    counts: Counter[str] = Counter()

    @directed
    @settings(max_examples=examples)
    @given(traces(16))
    def play(trace: Trace) -> None:
        counts.update(Player(trace, model, side).play().events)

    play()
    assert_all_met(counts, side)


@pytest.mark.parametrize("layer_pattern", ["M", "*"])
def test_one_kind_of_layer(side: str, layer_pattern: str) -> None:
    """Models whose prefixes need only states, or only blocks."""
    model = Symbols(side, layer_pattern)

    @settings(max_examples=2 * EXAMPLES)
    @given(traces(16))
    def play(trace: Trace) -> None:
        Player(trace, model, side).play()

    play()


@pytest.mark.parametrize(
    ("way", "examples"),
    [("reference", 3 * EXAMPLES), ("optimized", EXAMPLES), ("padded", EXAMPLES)],
)
def test_real_models(way: str, examples: int) -> None:
    """Fewer traces, with real arithmetic: equal to the lone run, within a class."""
    models = [RealModel(model_config(name)) for name in ("small", "all kinds")]
    counts: Counter[str] = Counter()

    @directed
    @settings(max_examples=examples)
    @given(traces(8, 3))
    def play(trace: Trace) -> None:
        # Which model plays follows from the trace, so that either meets many.
        model = models[len(trace.actions) % len(models)]
        counts.update(Player(trace, model, way).play().events)

    play()
    assert_all_met(counts, way)


def test_exceptions_harm_nobody_else(side: str) -> None:
    """Wherever one is thrown; and after it nothing is lost, leaked or made up."""
    model = Symbols(side)

    @settings(max_examples=4 * EXAMPLES)
    @given(failing(8))
    def play(trace: Trace) -> None:
        player = Player(trace, model, side).play()
        thrown = sum(isinstance(action, Fail) for action in trace.actions)
        ended = [o for o in player.finished.values() if o.finish_reason == "error"]
        assert len(ended) <= thrown
        assert all("Fault" in output.error for output in ended)

    play()


def test_bookkeeping_of_either_side(side: str) -> None:
    """An engine cannot tell whose scheduler, cache and pools it has."""
    models = [Symbols(side, bookkeeping=each) for each in SIDES]
    # One side takes blocks where the other need not ask.
    faults = [phase for phase in FAULTS if phase != "allocate"]

    @directed
    @settings(max_examples=EXAMPLES)
    @given(failing(12, faults))
    def play(trace: Trace) -> None:
        first, second = [Player(trace, model, side).play() for model in models]
        assert second.events == first.events
        for mine, theirs in zip(second.operations, first.operations, strict=True):
            assert mine.name == theirs.name
            if mine.record is not None and theirs.record is not None:
                assert_same_record(mine.record, theirs.record)

    play()


def test_a_fault_in_an_admission_costs_no_slot(side: str) -> None:
    """Blocks that cannot be had leave the live slot free."""
    Player(Trace((Add((0,)), Fail("allocate"))), Symbols(side), side).play()


def test_next_turn_computes_at_most_a_block_again(side: str) -> None:
    """Where memory allows, whatever else runs and however alike the chats are."""
    model = Symbols(side)

    @settings(max_examples=2 * EXAMPLES)
    @given(chats())
    def play(trace: Trace) -> None:
        player = Player(trace, model, side).play()
        for request_id, earlier in player.turns.items():
            before = len(earlier.prompt_token_ids) + len(earlier.token_ids)
            skipped = player.finished[request_id].cache.num_skipped_tokens
            # The last token drawn was never computed.
            assert before - skipped <= BLOCK, f"{skipped} of {before} were skipped"

    play()


def test_recorded_plans_can_be_replayed(side: str) -> None:
    """A second engine that is told plans and tokens does the same, id for id."""
    model = Symbols(side)

    @directed
    @settings(max_examples=2 * EXAMPLES)
    @given(traces(12))
    def play(trace: Trace) -> None:
        player = Player(trace, model, side).play()
        engine = second_engine(player)
        for first, second in replayed(engine, player.operations, forced=True):
            assert_same_record(first, second)
        assert not engine.has_work

    play()


def test_state_can_be_taken_over(side: str) -> None:
    """An engine that takes over another's state at any step goes on as that would."""
    model = Symbols(side)

    @settings(max_examples=2 * EXAMPLES)
    @given(traces(12), st.integers(0, 60))
    def play(trace: Trace, after: int) -> None:
        exported: list[tuple[int, Any]] = []

        def export(player: Player) -> None:
            if len(player.operations) == after:
                exported.append((after, player.engine.export_state()))

        player = Player(trace, model, side, before_each=export).play()
        for place, state in exported[:1]:
            engine = second_engine(player)
            engine.import_state(state)
            rest = player.operations[place:]
            for first, second in replayed(engine, rest, forced=False):
                assert_same_record(first, second)
            assert not engine.has_work

    play()
