"""Hazards found by reading another engine's sources: each shown absent here.

Every test asserts from the step record that its event happened, and holds each request
to its lone run.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from lockstep.plan import RowKind, SkipLimit
from lockstep.request import SamplingParams
from tests.engines import Run, greedy, make_engine, serve
from tests.scenarios.common import (
    BLOCK,
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    hash_blocks,
    is_mixed,
    reports_of,
    rows_of,
    serve_equal,
    slices_of,
    snapshots_of,
    text,
    tiny,
    watched,
    watched_method,
)
from tests.tolerances import assert_logprobs

MODULE = "engine"
PADDED = True

MODEL = tiny("M*")
FOUR = greedy(4)


@pytest.mark.parametrize("snapshot_slots", [0, 1])
def test_only_the_first_slice_of_a_prompt_skips(side: str, snapshot_slots: int) -> None:
    """K/V known for a later slice too must not keep Mamba from its tokens."""
    engine = make_engine(
        MODEL, side, snapshot_slots=snapshot_slots, max_tokens_per_step=32
    )
    prompt = text(64)
    ask(engine, prompt)
    if snapshot_slots:
        # The only slot now holds the state of another prompt: K/V is deeper than state.
        ask(engine, text(40, seed=1))
    output, run = serve_equal(engine, [prompt], FOUR)
    report = reports_of(run, output[0].request_id)[0]
    assert report.matched_kv_tokens == 64
    assert report.limit is SkipLimit.NO_STATE
    assert slices_of(run, output[0].request_id) == [(0, 32), (32, 64)]


def test_recomputed_tokens_leave_shared_blocks_alone(side: str) -> None:
    """K/V computed again may be rounded otherwise: readers must not see it change."""
    written: list[tuple[set[int], set[int]]] = []

    def watch(*args: Any, **kwargs: Any) -> None:
        blocks = {index // BLOCK for index in args[-1].tolist()}
        written.append((blocks, set(engine.export_state().blocks.hashes)))

    parts = {"attention.append_kv": watched(side, "append_kv", watch)}
    engine = make_engine(MODEL, side, components=parts)
    stem = text(2 * BLOCK)
    reader = engine.add(branch(stem, 50, seed=1), greedy(12))
    run = Run()
    run.note(engine.step())
    # The reader's prompt left one state, at its last boundary: none within the stem.
    writer = engine.add(branch(stem, 50, seed=2), greedy(12))
    record = run.note(engine.step())
    read, wrote = record.rows
    assert (read.request_id, wrote.request_id) == (reader, writer)
    assert read.kind is RowKind.DECODE
    assert (wrote.start, wrote.num_shared_blocks) == (0, 2)
    assert read.block_table[:2] == wrote.block_table[:2]
    drain_equal(engine, greedy(12), run)
    assert written
    assert not any(blocks & cached for blocks, cached in written)


def twins(
    engine: Any, length: int, first: int, second: int
) -> tuple[str, str, Run, dict[str, SamplingParams]]:
    """Start two requests with one prompt that will decode the same tokens."""
    prompt, run = text(length), Run()
    mine, other = greedy(first), greedy(second)
    one = engine.add(prompt, mine)
    run.note(engine.step())
    two = engine.add(prompt, other)
    return one, two, run, {one: mine, two: other}


@pytest.mark.parametrize("first", [18, 36, 50])
def test_requests_that_compute_one_block_both_keep_their_turns(
    side: str, first: int
) -> None:
    """Who computes what another has computed loses neither its blocks nor its state."""
    engine = make_engine(MODEL, side)
    short, long, run, sampling = twins(engine, BLOCK, first, 34)
    drain_equal(engine, sampling, run)
    together = [
        record
        for record in run.records
        if {r.request_id for r in record.rows} == {short, long}
    ]
    assert together
    for name in (short, long):
        output = run.outputs[name]
        turn = output.prompt_token_ids + output.token_ids + [3, 4, 5]
        computed = len(turn) - ask(engine, turn).cache.num_skipped_tokens
        assert computed <= BLOCK + 4
    assert_nothing_held(engine)


def test_a_copy_that_goes_leaves_the_other_findable(side: str) -> None:
    """Two blocks with one content: the end of one must not delist the other."""
    engine = make_engine(MODEL, side)
    short, long, run, sampling = twins(engine, BLOCK, 20, 20)
    drain_equal(engine, sampling, run)
    tables = [rows_of(run, name)[-1].block_table for name in (short, long)]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    block_hash = hash_blocks(text(BLOCK) + run.outputs[short].token_ids)[1]
    known = [key for record in run.records for key in record.registered_blocks]
    assert known.count(block_hash) == 1
    again = text(BLOCK) + run.outputs[short].token_ids
    assert ask(engine, again).cache.matched_kv_tokens == 2 * BLOCK


def test_a_step_keeps_to_a_budget_that_is_no_round_number(side: str) -> None:
    """Nothing rounds the tokens of a step up beyond what it may compute.

    A padded step has room for decoding rows besides.
    """
    engine = make_engine(MODEL, side, max_tokens_per_step=37)
    _, run = serve_equal(engine, [text(50, seed) for seed in range(4)], FOUR)
    assert any(record.shape.tokens == 37 for record in run.records)
    assert all(record.shape.tokens <= 37 for record in run.records)
    assert all(record.padded_shape.prefill_tokens <= 37 for record in run.records)


def test_two_rows_at_one_boundary_share_a_slot(side: str) -> None:
    """A state wanted twice in a step is stored once, and is the right one."""
    engine = make_engine(MODEL, side, max_tokens_per_step=128)
    stem = text(2 * BLOCK)
    ask(engine, branch(stem, 50, seed=1))
    outputs, run = serve_equal(
        engine, [branch(stem, 40, seed=2), branch(stem, 40, seed=3)], FOUR
    )
    first = run.records[0]
    assert [(row.start, row.end) for row in first.rows] == [(0, 40), (0, 40)]
    points = [[s.position for s in row.snapshots] for row in first.rows]
    assert points[0] == [32] and 32 not in points[1]
    sibling = ask(engine, branch(stem, 40, seed=4))
    assert sibling.cache.num_skipped_tokens == 32
    assert len(outputs) == 2


def test_memory_that_nobody_wrote_reaches_no_router(side: str) -> None:
    """Freed and unused memory holds NaN; mixed steps of a MoE model stay finite."""
    model = tiny("ME*")
    engine = make_engine(model, side, max_tokens_per_step=24)
    _, run = serve_equal(engine, [text(30, seed) for seed in range(3)], greedy(6))
    assert sum(map(is_mixed, run.records)) >= 2
    values = [v for record in run.records for v in record.logprobs.values()]
    assert all(bool(torch.isfinite(each).all()) for each in values)


def test_a_restore_is_exact_where_states_are_stored_short(side: str) -> None:
    """The state is rounded after each token, not only where it is stored."""
    prompt, again = text(40), branch(text(32), 45, seed=1)
    found: dict[bool, Any] = {}
    for caching in (False, True):
        engine = make_engine(
            MODEL, side, prefix_caching=caching, ssm_state_dtype="bfloat16"
        )
        serve(engine, [prompt], FOUR)
        outputs, run = serve(engine, [again], FOUR)
        found[caching] = (outputs[0], run.logprobs[outputs[0].request_id])
    (plain, expected), (cached, actual) = found[False], found[True]
    assert (plain.cache.num_skipped_tokens, cached.cache.num_skipped_tokens) == (0, 32)
    assert min(actual) == 32 and cached.token_ids == plain.token_ids
    for position, values in actual.items():
        assert_logprobs(side, values, expected[position], torch.bfloat16)
    # The option does something: float32 states give other numbers.
    exact, run = serve(make_engine(MODEL, side), [again], FOUR)
    wide = run.logprobs[exact[0].request_id]
    assert not torch.equal(wide[44], expected[44])


def test_the_state_at_the_end_of_a_slice_is_kept(side: str) -> None:
    """A slice that ends on a boundary stores its state, though the prompt goes on."""
    engine = make_engine(MODEL, side, max_tokens_per_step=32)
    prompt = text(70)
    outputs, run = serve_equal(engine, [prompt], FOUR)
    name = outputs[0].request_id
    assert slices_of(run, name) == [(0, 32), (32, 64), (64, 70)]
    assert snapshots_of(run, name) == [32, 64]
    shorter = ask(engine, branch(prompt[:40], 45, seed=1))
    assert shorter.cache.num_skipped_tokens == 32


@pytest.mark.parametrize("rest", [1, 2, 3])
def test_a_slice_shorter_than_the_window_keeps_older_inputs(
    side: str, rest: int
) -> None:
    """Fewer new tokens than the convolution looks back, then decode."""
    engine = make_engine(MODEL, side, max_tokens_per_step=BLOCK)
    outputs, run = serve_equal(engine, [text(2 * BLOCK + rest)], FOUR)
    assert slices_of(run, outputs[0].request_id)[-1] == (32, 32 + rest)
    assert rest <= MODEL.mamba.conv_window  # type: ignore[union-attr]


def test_a_deferral_does_not_end_the_round(side: str) -> None:
    """Behind a request that waits for a prefix, others are admitted."""
    engine = make_engine(MODEL, side)
    prompts = [branch(text(20), 30, seed=1), branch(text(20), 30, seed=2), text(10, 9)]
    outputs, run = serve_equal(engine, prompts, FOUR)
    first, twin, other = (output.request_id for output in outputs)
    assert run.records[0].plan.deferred == [twin]
    assert [row.request_id for row in run.records[0].rows] == [first, other]
    assert reports_of(run, twin)[0].matched_kv_tokens == BLOCK


def test_a_skip_lands_only_where_a_state_is(side: str) -> None:
    """However few tokens are left, nothing is skipped without a state to start from."""
    engine = make_engine(MODEL, side, block_size=32)
    seed = text(75)
    outputs, run = serve_equal(engine, [seed], FOUR)
    # Decoding reached no boundary: 75 + 3 tokens were computed.
    assert snapshots_of(run, outputs[0].request_id) == [64]
    one_left, run = serve_equal(engine, [seed[:65]], FOUR)
    assert slices_of(run, one_left[0].request_id)[0] == (64, 65)
    start = rows_of(run, one_left[0].request_id)[0].initial_slot_id
    assert engine.sizes.first_snapshot_slot <= start < engine.sizes.zero_slot
    none_left, run = serve_equal(engine, [seed[:64]], FOUR)
    assert slices_of(run, none_left[0].request_id)[0] == (0, 64)
    assert none_left[0].cache.limit is SkipLimit.LAST_TOKEN
    # That run stored the boundary before, so the next one has a place to land.
    assert ask(engine, seed[:64]).cache.num_skipped_tokens == 32


def test_snapshots_belong_to_their_rows_when_a_row_ends(side: str) -> None:
    """A request that ends in the step, on a boundary or not, displaces nobody."""
    engine = make_engine(MODEL, side, max_tokens_per_step=128)
    sampling: dict[str, SamplingParams] = {}
    run = Run()
    # Both decode in the next step, and end there: one exactly on a boundary.
    for length, seed in ((31, 1), (20, 2)):
        sampling[engine.add(text(length, seed), greedy(2))] = greedy(2)
    run.note(engine.step())
    stem = text(2 * BLOCK, seed=3)
    third = engine.add(branch(stem, 40, seed=4), greedy(6))
    sampling[third] = greedy(6)
    record = run.note(engine.step())
    assert len(record.finished) == 2 and len(record.rows) == 3
    assert [len(row.snapshots) for row in record.rows] == [1, 0, 1]
    drain_equal(engine, sampling, run)
    restored = ask(engine, branch(stem, 45, seed=5))
    assert restored.cache.num_skipped_tokens == 32
    grown = ask(
        engine,
        [
            *run.outputs["request-1"].prompt_token_ids,
            *run.outputs["request-1"].token_ids,
            7,
        ],
    )
    assert grown.cache.num_skipped_tokens == 32


def test_one_admission_cannot_evict_what_another_restores(side: str) -> None:
    """Two admissions in a round, the second in need of blocks and of a slot."""
    engine = make_engine(MODEL, side, num_blocks=8, snapshot_slots=2)
    stem = text(2 * BLOCK)
    ask(engine, stem + [1])  # Cached: 2 blocks, a state at 32; the oldest content.
    ask(engine, text(4 * BLOCK, seed=1))
    ask(engine, stem + [2])
    run = Run()
    hit = engine.add(branch(stem, 47, seed=2), FOUR)
    miss = engine.add(text(20, seed=3), FOUR)
    record = run.note(engine.step())
    assert [row.request_id for row in record.rows] == [hit, miss]
    assert record.rows[0].start == 32
    assert record.plan.evicted_blocks and record.plan.evicted_states
    drain_equal(engine, FOUR, run)


def test_a_small_first_batch_decides_nothing(side: str) -> None:
    """What the first step looked like leaves no trace in later ones."""
    engine = make_engine(MODEL, side)
    _, run = serve_equal(engine, [[5]], greedy(1))
    assert run.records[0].shape.tokens == 1
    _, run = serve_equal(engine, [text(60)], FOUR)
    assert run.records[0].shape.tokens == 60


def test_snapshots_change_no_output_and_cannot_be_switched(side: str) -> None:
    """With slots, without, without a cache: one result; options stay as they are."""
    prompts = [text(40), branch(text(32), 45, seed=1)]
    skipped: list[int] = []
    choices: list[dict[str, Any]] = [
        {},
        {"snapshot_slots": 0},
        {"prefix_caching": False},
    ]
    for options in choices:
        engine = make_engine(MODEL, side, **options)
        skipped.append(sum(ask(engine, p).cache.num_skipped_tokens for p in prompts))
        with pytest.raises(FrozenInstanceError):
            engine.engine_config.snapshot_slots = 4
    assert skipped == [32, 0, 0]


def test_nothing_is_advertised_before_it_is_computed(side: str) -> None:
    """After a forward pass that failed, its prompts are unknown to the cache."""
    failing = [True]

    def fail_once(*_: Any, **__: Any) -> None:
        if failing:
            failing.pop()
            raise RuntimeError("lost")

    parts = {"model.Model": watched_method(side, "Model", "forward", fail_once)}
    engine = make_engine(MODEL, side, components=parts)
    names = [engine.add(text(40, seed), FOUR) for seed in range(2)]
    run = Run()
    record = run.note(engine.step())
    assert len(record.rows) == 2 and record.interrupted == names
    assert any(row.snapshots for row in record.rows)
    state = engine.export_state()
    assert not state.blocks.hashes and not state.slots.stored
    drain_equal(engine, FOUR, run)
    assert reports_of(run, names[0])[-1].limit is SkipLimit.NO_MATCH
    assert ask(engine, text(40)).cache.num_skipped_tokens == 32


def test_the_branch_point_of_a_later_slice_is_absolute(side: str) -> None:
    """A sibling leaves the cached prompt inside its second slice."""
    engine = make_engine(MODEL, side, max_tokens_per_step=32, snapshot_slots=2)
    stem = text(3 * BLOCK)
    ask(engine, branch(stem, 70, seed=1))
    # Takes both slots: of the first prompt only K/V is left.
    ask(engine, text(70, seed=9))
    outputs, run = serve_equal(engine, [branch(stem, 70, seed=2)], FOUR)
    name = outputs[0].request_id
    assert outputs[0].cache.matched_kv_tokens == 48
    assert outputs[0].cache.limit is SkipLimit.NO_STATE
    assert slices_of(run, name)[:2] == [(0, 32), (32, 64)]
    assert [s.position for s in rows_of(run, name)[1].snapshots] == [48, 64]
    assert ask(engine, branch(stem, 63, seed=3)).cache.num_skipped_tokens == 48


def test_one_token_left_over_moves_no_slice_off_a_boundary(side: str) -> None:
    """A prompt one token longer than its slices is cut on boundaries all the same."""
    engine = make_engine(MODEL, side, max_tokens_per_step=32)
    prompt = text(65)
    outputs, run = serve_equal(engine, [prompt], FOUR)
    name = outputs[0].request_id
    assert slices_of(run, name) == [(0, 32), (32, 64), (64, 65)]
    assert snapshots_of(run, name) == [32, 64]
    assert ask(engine, prompt).cache.num_skipped_tokens == 64
