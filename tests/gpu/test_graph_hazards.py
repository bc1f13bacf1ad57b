"""Bugs that engines with graphs once had, tried on graphs and kernels.

Most are scenarios of `tests/scenarios` once more, where another part can go wrong:

* Memory that capture or padding writes: a first request, in any slot, finds zero; rows
  of padding touch dummies alone, and read of them what harms nobody; idle slots, and
  what a prefix shares, keep every bit.
* Inputs that a replay reads: every layer has states of its own; a step that is smaller
  than its graph uses its own rows; rows that move take their states along; a reset, or
  a state moved to another engine, leaves no old address or table behind.
* Slices in graphs: fewer tokens than the window of the convolution, one token, the last
  one of a prompt, any cut of a scan chunk; a row with a past and several tokens is no
  decode; a restored row beside one that stores, or shorter than a scan chunk.
* States that are advertised are there: stored in mixed steps, while many decode, with
  no slot or one to keep them in, pass after pass.
* Company: one prompt many times over, prompts of one token and of many packed together,
  greedy and random draws, ends in the same step, aborts between two replays.
* The host: a slice of which nothing is read waits for nothing, any other step for its
  tokens alone, once.
* Size: places in pools of more than 2^31 numbers.

Copies that are late are in `test_ordering.py`, a full card in `test_full_card.py`, many
engines and a busy neighbour in `test_graph_scenarios.py`.

On a CPU, ``python -m pytest -m gpu tests/gpu/test_graph_hazards.py`` runs the same at
padded shapes.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import AttentionConfig, MambaConfig, ModelConfig
from lockstep.request import RequestState
from lockstep.trace import EngineState, StepRecord
from tests.engines import (
    Run,
    assert_equals_lone,
    drain,
    greedy,
    make_engine,
    serve,
)
from tests.matrix import fetch, to_host
from tests.scenarios import test_engine_areas, test_hazards, test_public_bugs
from tests.scenarios.common import (
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    serve_equal,
    text,
    tiny,
)

pytestmark = pytest.mark.gpu

#: Only the optimized side has graphs, so that it is the only one found by this name.
MODULE = "graphs"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
GRAPHS, MODE = ("all", "graph") if HAS_GPU else ("padded", "padded")
MODEL = tiny("M*E")
FOUR = greedy(4)

#: Scenarios by the module that has them.
SCENARIOS = {
    test_engine_areas: (
        "test_a_prompt_that_ends_on_a_block_backs_off",
        "test_cached_and_fresh_rows_share_a_batch",
        "test_snapshots_fill_their_slots_exactly",
        "test_blocks_of_one_scan_chunk_or_several",
        "test_decode_evicts_a_cached_block_when_none_is_free",
        "test_a_resumed_request_evicts_a_cached_block",
        "test_reset_keeps_the_cache_when_told",
        "test_five_prompts_along_one_tree",
    ),
    test_hazards: (
        "test_two_rows_at_one_boundary_share_a_slot",
        "test_memory_that_nobody_wrote_reaches_no_router",
        "test_a_slice_shorter_than_the_window_keeps_older_inputs",
        "test_snapshots_belong_to_their_rows_when_a_row_ends",
        "test_one_admission_cannot_evict_what_another_restores",
        "test_a_small_first_batch_decides_nothing",
        "test_snapshots_change_no_output_and_cannot_be_switched",
        "test_the_branch_point_of_a_later_slice_is_absolute",
    ),
    test_public_bugs: (
        "test_each_mamba_layer_has_a_state_of_its_own",
        "test_a_short_suffix_leaves_the_shared_prefix_alone",
        "test_a_short_last_slice_keeps_older_inputs",
        "test_a_state_stored_in_a_mixed_step_is_real",
        "test_states_stored_while_many_decode",
        "test_matches_are_absolute_in_every_slice",
        "test_a_budget_off_the_grid_still_hits",
        "test_the_cache_survives_idle_steps",
        "test_a_match_is_not_evicted_by_its_own_admission",
        "test_holders_that_end_in_one_step",
        "test_ids_are_unique_after_a_reset",
        "test_too_few_slots_cost_snapshots_not_requests",
        "test_a_slot_pinned_by_a_restore_is_not_taken",
        "test_one_prompt_eight_times",
        "test_a_full_hit_computes_at_least_a_token",
        "test_the_second_turn_computes_little",
        "test_a_slot_used_before_starts_from_zero",
        "test_memory_nobody_wrote_is_not_read",
        "test_a_preempted_request_equals_itself",
        "test_as_many_requests_as_slots",
        "test_layers_of_one_kind_in_any_place",
        "test_a_suspended_engine_resumes",
        "test_time_steps_are_clamped",
        "test_a_prompt_cut_anywhere",
        "test_several_tokens_on_top_of_a_cache",
        "test_packed_prompts_do_not_touch",
        "test_packed_prompts_with_states_to_start_from",
        "test_decode_after_a_prompt_uses_raw_inputs",
        "test_idle_slots_are_not_written",
        "test_state_follows_its_request",
        "test_a_resumed_row_beside_one_that_snapshots",
        "test_every_pass_equals_the_first",
    ),
}
for _module, _names in SCENARIOS.items():
    globals().update({name: getattr(_module, name) for name in _names})


def graphed(
    config: ModelConfig,
    side: str = "optimized",
    components: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Build an engine that replays every step; what is seen of it is on the CPU."""
    assert side == "optimized"
    engine = make_engine(config, side, components, DEVICE, graphs=GRAPHS, **options)
    step, export_state = engine.step, engine.export_state

    def take_step(**given: Any) -> StepRecord:
        record = step(**given)
        assert record.mode == MODE or not record.rows, record.eager_reason
        logprobs = record.logprobs
        values = fetch(list(logprobs.values()))
        record.logprobs = dict(zip(logprobs, values, strict=True))
        return record

    def export_to_host() -> EngineState:
        return to_host(StepRecord(0), export_state())[1]

    engine.step, engine.export_state = take_step, export_to_host
    return engine


@pytest.fixture(autouse=True)
def scenarios_use_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scenarios build engines with graphs."""
    for module in SCENARIOS:
        monkeypatch.setattr(module, "make_engine", graphed)


def test_capture_leaves_memory_as_it_was() -> None:
    """Passes over padding write the dummies and nothing else, above all no slot 0."""
    engine = graphed(MODEL, debug=())
    sizes, caches = engine.sizes, engine.export_state().caches
    for pool in (
        caches.kv[:, :, : sizes.dummy_block],
        caches.conv[:, : sizes.dummy_slot],
        caches.ssm[:, : sizes.dummy_slot],
    ):
        assert pool.numel() and not pool.any()


def test_dummies_full_of_nan_harm_nobody() -> None:
    """Padding may read anything there; no real row, and no expert, sees it."""
    engine = graphed(MODEL, max_tokens_per_step=40)
    names = [engine.add(text(10 + 31 * n, seed=n), greedy(6)) for n in range(3)]
    run = Run()
    while engine.has_work:
        engine.caches.kv[:, :, engine.sizes.dummy_block] = math.nan
        for pool in engine.caches.tensors()[1:]:
            pool[:, engine.sizes.dummy_slot] = math.nan
        run.note(engine.step())
    assert any(record.padded_shape != record.shape for record in run.records)
    run = drain_equal(engine, greedy(6), run)
    assert set(run.outputs) == set(names)
    assert ask(engine, text(72, seed=2)).cache.num_skipped_tokens == 64


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        (0, RequestState.WAITING),
        (1, RequestState.PREFILL),
        (2, RequestState.PREFILL),
        (3, RequestState.DECODE),
        (5, RequestState.DECODE),
    ],
)
def test_an_abort_between_two_replays(steps: int, state: RequestState) -> None:
    """Queued, in the middle of its prompt or decoding: slot and blocks are reused."""
    engine = graphed(MODEL, max_tokens_per_step=24, max_requests=2)
    ask(engine, text(40))
    run = Run()
    stays = engine.add(text(20, seed=1), greedy(12))
    goes = engine.add(branch(text(32), 60, seed=2), greedy(12))
    for _ in range(steps):
        run.note(engine.step())
    assert engine.scheduler.find(goes).state is state
    engine.abort(goes)
    later = engine.add(branch(text(32), 45, seed=3), greedy(12))
    drain_equal(engine, greedy(12), run)
    assert {stays, later} <= set(run.outputs)
    assert_nothing_held(engine)


def test_one_engine_for_all_kinds_of_steps() -> None:
    """Graphs share memory and the buffer of logits; none spoils what another gives."""
    engine = graphed(MODEL, max_requests=4, max_tokens_per_step=64)
    outputs: list[list[int]] = []
    for _ in range(2):
        for lengths in ((1,), (64,), (3, 60), (17, 17, 17, 13), (2, 2), (33, 1, 1)):
            prompts = [text(n, seed=n + i) for i, n in enumerate(lengths)]
            served, _ = serve_equal(engine, prompts, FOUR)
            outputs.append([token for each in served for token in each.token_ids])
        engine.reset()
    assert outputs[: len(outputs) // 2] == outputs[len(outputs) // 2 :]


@contextmanager
def _waiting(mode: str) -> Generator[None]:
    """Let torch refuse, or not, whatever makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode() if HAS_GPU else 0
    if HAS_GPU:
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode(before)


def _unread(graphs: str = GRAPHS, **options: Any) -> Any:
    """Build an engine of which a test reads nothing between steps."""
    options = {"record_logprobs": False, "debug": (), **options}
    return make_engine(MODEL, "optimized", device=DEVICE, graphs=graphs, **options)


@pytest.mark.parametrize(("graphs", "mode"), [(GRAPHS, MODE), ("off", "eager")])
def test_a_slice_reads_nothing(graphs: str, mode: str) -> None:
    """Slices of a prompt, of which nothing is read, leave the host free to go on."""
    engine = _unread(graphs, max_tokens_per_step=16)
    ask(engine, text(16, seed=1))
    engine.add(text(16 * 6), greedy(1))
    for _ in range(5):
        with _waiting("error"):
            record = engine.step()
        assert record.mode == mode and not record.host_reads
        assert not record.interrupted and not record.failed
    assert len(drain(engine).outputs) == 1


def test_a_step_waits_for_its_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that decode, prefill or both, drawing in any way, are read once each.

    What is reported of them is read with the tokens; a prompt's reports may want more
    logits than a graph has, so that their step runs eagerly.
    """
    engine = _unread(max_tokens_per_step=24)
    tolist, reads = Tensor.tolist, list[int]()

    def read_and_wait(values: Tensor) -> list[float]:
        reads.append(len(values))
        with _waiting("default"):
            return tolist(values)

    monkeypatch.setattr(Tensor, "tolist", read_and_wait)
    reports = {"logprobs": 2}, {"prompt_logprobs": 1}, {}
    for seed, (length, reported) in enumerate(zip((5, 40, 16), reports, strict=True)):
        drawing = {"temperature": 0.7 * (seed % 2), "top_p": 0.9, "seed": seed}
        engine.add(text(length, seed), greedy(6, **drawing, **reported))
    kinds, seen = set[tuple[bool, bool]](), set[tuple[bool, bool]]()
    while engine.has_work:
        with _waiting("error"):
            record = engine.step()
        assert record.mode == MODE or record.prompt_reported, record.eager_reason
        assert not record.interrupted and not record.failed, record.failed
        numbers = len(record.tokens) + 5 * len(record.reported)
        numbers += sum(3 * len(found) for found in record.prompt_reported.values())
        assert reads == ([numbers] if numbers else [])
        reads.clear()
        seen.add((bool(record.reported), bool(record.prompt_reported)))
        kinds.add((record.shape.prefill_requests > 0, record.shape.decode_requests > 0))
    assert kinds == {(True, False), (True, True), (False, True)}
    assert {(True, False), (True, True)} <= seen


def test_offsets_beyond_32_bits() -> None:
    """The last blocks and slots of pools with more than 2^31 numbers work as any."""
    mamba = MambaConfig(
        num_heads=16, head_dim=64, state_size=128, num_groups=8, scan_chunk_size=16
    )
    attention = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=128)
    config = tiny("M*", mamba=mamba, attention=attention)
    num_blocks, snapshot_slots = (140_000, 17_000) if HAS_GPU else (40, 20)
    engine = graphed(
        config, num_blocks=num_blocks, snapshot_slots=snapshot_slots, debug=()
    )
    # What is last in a list is taken first.
    blocks, slots = engine.blocks.export_state(), engine.slots.export_state()
    blocks.free.sort()
    slots.free_snapshots.sort()
    engine.blocks.import_state(blocks)
    engine.slots.import_state(slots)
    prompt = text(40)
    for skipped in (0, 32):
        outputs, run = serve(engine, [prompt], FOUR)
        assert outputs[0].cache.num_skipped_tokens == skipped
        for output in outputs:
            assert_equals_lone(config, output, run, FOUR)
    (restored,) = [row for record in run.records for row in record.rows if row.cache]
    far = [
        restored.initial_slot_id * engine.caches.ssm[0, 0].numel(),
        min(restored.block_table) * engine.caches.kv[0, 0, 0].numel(),
    ]
    assert all((place > 2**31) == HAS_GPU for place in far)
