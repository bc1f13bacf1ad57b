"""Bugs that were reported against real engines, each tried as a kind here.

=====================================================  =================================
test                                                   reported as
=====================================================  =================================
test_each_mamba_layer_has_a_state_of_its_own           vllm#34874, vllm#34865
test_a_short_suffix_leaves_the_shared_prefix_alone     vllm#56196
test_a_short_last_slice_keeps_older_inputs             Megatron-LM#6711,
                                                       Megatron-LM#3404,
                                                       flash-attention#1537
test_a_state_stored_in_a_mixed_step_is_real            sglang#39342, sglang#39526
test_states_stored_while_many_decode                   sglang#32555
test_matches_are_absolute_in_every_slice               Megatron-LM#4758
test_a_budget_off_the_grid_still_hits                  Megatron-LM#5952
test_the_cache_survives_idle_steps                     Megatron-LM#5502
test_a_match_is_not_evicted_by_its_own_admission       Megatron-LM#5822
test_holders_that_end_in_one_step                      Megatron-LM#6047
test_ids_are_unique_after_a_reset                      Megatron-LM#2584
test_too_few_slots_cost_snapshots_not_requests         Megatron-LM#6091, sglang#36770,
                                                       sglang#40128
test_a_slot_pinned_by_a_restore_is_not_taken           Megatron-LM#6091
test_different_prompts_never_share                     Megatron-LM#4158, vllm#12621,
                                                       vllm#15297, openvino.genai#3722
test_a_cache_that_can_do_nothing_warns                 vllm#48401
test_counters_tell_what_was_skipped                    vllm#54504, vllm#51198,
                                                       vllm#51250, vllm#42317,
                                                       vllm-ascend#16639
test_siblings_of_a_long_prefix_hit                     vllm#45238, vllm#40696
test_a_chat_outlives_older_one_off_prompts             vllm#42656
test_one_prompt_eight_times                            vllm#43090, vllm#57267
test_a_full_hit_computes_at_least_a_token              vllm#11186, vllm#17999,
                                                       llama-cpp-python#178
test_skipped_positions_have_no_log_probabilities       vllm#3251, vllm#8268, vllm#42019
test_a_slot_freed_mid_restore_serves_the_next          sglang#30986
test_the_second_turn_computes_little                   llama.cpp#24055, llama.cpp#25592
test_a_slot_used_before_starts_from_zero               vllm#56524, sglang#17404
test_memory_nobody_wrote_is_not_read                   vllm#35219, vllm#43990
test_a_preempted_request_equals_itself                 vllm-metal#488, vllm#54993
test_what_fits_exactly_runs_and_what_does_not_is_told  Megatron-LM#5950
test_an_oversize_request_blocks_nobody                 vllm#39734, vllm#35541, vllm#2163
test_a_large_request_waits_at_the_head_and_runs        vllm#2163
test_admission_takes_all_or_nothing                    sglang#39787
test_as_many_requests_as_slots                         TensorRT-LLM#13179
test_what_the_allocator_gave_does_not_change           Megatron-LM#6584
test_layers_of_one_kind_in_any_place                   Megatron-LM#3399,
                                                       Megatron-LM#4775
test_a_suspended_engine_resumes                        Megatron-LM#3631,
                                                       Megatron-LM#3696
test_indices_beyond_32_bits                            vllm#35275
test_states_are_kept_as_asked                          vllm#39032, sglang#10258,
                                                       TensorRT-LLM#12826
test_time_steps_are_clamped                            TensorRT-LLM#14509
test_a_prompt_cut_anywhere                             TensorRT-LLM#6334
test_several_tokens_on_top_of_a_cache                  transformers#46032,
                                                       transformers#46084
test_packed_prompts_do_not_touch                       mamba#782, mamba#783
test_packed_prompts_with_states_to_start_from          causal-conv1d#75,
                                                       causal-conv1d#118
test_decode_after_a_prompt_uses_raw_inputs             mamba#1027
test_idle_slots_are_not_written                        TensorRT-LLM#13151, vllm#42947,
                                                       vllm#23035
test_state_follows_its_request                         Megatron-LM#2293, vllm#36013
test_a_resumed_row_beside_one_that_snapshots           sglang#29368
test_every_pass_equals_the_first                       sglang#31099, sglang#32606
test_a_refused_admission_counts_nothing                Megatron-LM#6416
test_names_in_flight_are_unique                        vllm#10583, vllm#15041,
                                                       vllm#23697
test_an_empty_prompt_is_refused                        vllm#7632, vllm#7283, vllm#7746
test_impossible_limits_are_refused                     vllm#43532, vllm-ascend#8020
test_ignoring_the_end_token_ignores_that_alone         vllm#4589, vllm#28185
test_greedy_and_random_rows_in_one_batch               vllm#22180, vllm#22261,
                                                       vllm#5404, FreeToken#471
test_greedy_with_filters_is_greedy                     Megatron-Bridge#5759,
                                                       nano-vllm#249
test_top_k_keeps_exactly_k                             Megatron-LM (torch sampler)
test_an_unset_seed_is_fresh_and_a_set_one_holds        mini-sglang (commit 690f55a)
test_eviction_counts_whole_blocks                      mini-sglang (commit dae78f6)
test_times_of_a_request_without_tokens                 Megatron-LM#4645
test_the_longest_request_is_stated_at_the_door         vllm#765, vllm#33418, vllm#23683
=====================================================  =================================

Aborts in any phase (sglang#12693, sglang#18746) are in ``test_faults.py``; speculation,
offload, parallel stages, 8-bit caches and odd chunk sizes (vllm#53912, LMCache#4247,
vllm#37554, vllm#57266, mamba#354) are in ``test_refused.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig
from lockstep.blocks import ROOT_HASH, BlockHash
from lockstep.errors import RequestError
from lockstep.plan import RowKind, RowPlan, SkipLimit, StepPlan
from lockstep.request import Request, SamplingParams
from tests.engines import (
    Run,
    assert_equals_lone,
    backend_of,
    drain,
    greedy,
    make_engine,
    serve,
)
from tests.factories import make_draws
from tests.scenarios.common import (
    BLOCK,
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    first_ending,
    hash_blocks,
    is_mixed,
    num_computed,
    part,
    reports_of,
    rows_of,
    serve_equal,
    slices_of,
    snapshots_of,
    text,
    tiny,
)
from tests.tolerances import assert_consistent, assert_reports

MODULE = "engine"
PADDED = True

MODEL = tiny("M*")
FOUR = greedy(4)


def chat_turn(engine: Any, history: Sequence[int], new: Sequence[int]) -> list[int]:
    """Serve one turn and return the history with it."""
    output = ask(engine, [*history, *new], greedy(20))
    return [*output.prompt_token_ids, *output.token_ids]


def test_the_table_names_every_test() -> None:
    """And no test that is gone."""
    table = [line.split()[0] for line in str(__doc__).splitlines() if line.strip()]
    listed = [word for word in table if word.startswith("test_")]
    here = [name for name in globals() if name.startswith("test_")]
    here.remove("test_the_table_names_every_test")
    assert listed == here


# Cached prefixes.


def test_each_mamba_layer_has_a_state_of_its_own(side: str) -> None:
    """A restore gives every layer its own state, in prefill and in decode."""
    engine = make_engine(tiny("M*MM"), side)
    ask(engine, text(40))
    state = engine.export_state()
    slot = next(iter(state.slots.stored.values()))
    layers = [
        pool[layer, slot] for pool in state.caches.tensors()[1:] for layer in (0, 1, 2)
    ]
    assert not any(torch.equal(layers[i], layers[i + 1]) for i in (0, 1, 3, 4))
    again = ask(engine, branch(text(32), 45, seed=1), greedy(6))
    assert again.cache.num_skipped_tokens == 32
    # A state copied while decoding, too.
    history = chat_turn(engine, [], text(20, seed=2))
    assert ask(engine, [*history, 1]).cache.num_skipped_tokens == 32


@pytest.mark.parametrize("suffix", [1, 2, 3])
def test_a_short_suffix_leaves_the_shared_prefix_alone(side: str, suffix: int) -> None:
    """Fewer new tokens than the convolution's window, on a shared snapshot."""
    engine = make_engine(MODEL, side)
    stem = text(2 * BLOCK)
    ask(engine, branch(stem, 40, seed=1))
    state = engine.export_state()
    slot = state.slots.stored[hash_blocks(stem)[1]]
    before = [pool[:, slot].clone() for pool in state.caches.tensors()[1:]]
    short, run = serve_equal(engine, [branch(stem, 32 + suffix, seed=2)], FOUR)
    assert slices_of(run, short[0].request_id) == [(32, 32 + suffix)]
    pools = engine.export_state().caches.tensors()[1:]
    after = [pool[:, slot] for pool in pools]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    third = ask(engine, branch(stem, 40, seed=3))
    assert third.cache.num_skipped_tokens == 32


@pytest.mark.parametrize("rest", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 32])
def test_a_short_last_slice_keeps_older_inputs(
    side: str, budget: int, rest: int
) -> None:
    """Prompts of a whole number of slices and one to three tokens more."""
    engine = make_engine(MODEL, side, max_tokens_per_step=budget)
    outputs, run = serve_equal(engine, [text(budget + rest)], FOUR)
    name = outputs[0].request_id
    assert slices_of(run, name) == [(0, budget), (budget, budget + rest)]
    # The last slice is a prefill, though it is as long as a decode.
    assert [row.kind for row in rows_of(run, name)][:2] == [RowKind.PREFILL] * 2


def test_a_state_stored_in_a_mixed_step_is_real(side: str) -> None:
    """A slice beside decoding rows stores a state that is then used."""
    engine = make_engine(MODEL, side, max_tokens_per_step=40)
    run = Run()
    sampling = {engine.add(text(10, s), greedy(9)): greedy(9) for s in (1, 2)}
    run.note(engine.step())
    prompt = text(60)
    late = engine.add(prompt, FOUR)
    drain_equal(engine, {**sampling, late: FOUR}, run)
    mixed = [r for r in run.records if is_mixed(r) and r.stored_states]
    assert len(mixed) >= 2
    assert ask(engine, prompt).cache.num_skipped_tokens == 48


def test_states_stored_while_many_decode(side: str) -> None:
    """Three rows cross a boundary in one decode step; each state is its own."""
    engine = make_engine(MODEL, side, max_tokens_per_step=128)
    prompts = [text(28, seed) for seed in range(3)]
    outputs, run = serve_equal(engine, prompts, greedy(8))
    crossing = [
        record
        for record in run.records
        if record.shape.decode_requests == 3 and len(record.stored_states) == 3
    ]
    assert len(crossing) == 1
    for output in outputs:
        history = [*output.prompt_token_ids, *output.token_ids]
        assert ask(engine, [*history, 1]).cache.num_skipped_tokens == 32


def test_matches_are_absolute_in_every_slice(side: str) -> None:
    """The first slice could be skipped whole; K/V and state agree on how far."""
    engine = make_engine(MODEL, side, max_tokens_per_step=32)
    prompt = text(90)
    ask(engine, prompt)
    outputs, run = serve_equal(engine, [branch(prompt[:80], 90, seed=1)], FOUR)
    report = outputs[0].cache
    assert report.matched_kv_tokens == report.matched_state_tokens == 80
    assert slices_of(run, outputs[0].request_id) == [(80, 90)]


@pytest.mark.parametrize(("budget", "inside"), [(10, 32), (23, 32), (37, 32), (50, 0)])
def test_a_budget_off_the_grid_still_hits(side: str, budget: int, inside: int) -> None:
    """Slices end on boundaries where they can, so a second time is cheap."""
    engine = make_engine(MODEL, side, max_tokens_per_step=budget)
    prompt = text(60)
    ask(engine, prompt)
    again = ask(engine, prompt)
    assert again.cache.num_skipped_tokens == 48
    assert again.cache.limit is SkipLimit.ALL_MATCHED
    # So is a prompt that has in common what the first slices computed.
    shorter = ask(engine, branch(prompt[:40], 45, seed=1))
    assert shorter.cache.num_skipped_tokens == inside


def test_the_cache_survives_idle_steps(side: str) -> None:
    """Steps without work change nothing; a prompt below the window is safe."""
    engine = make_engine(MODEL, side)
    for length in (1, 2, 3):
        ask(engine, text(length, seed=length))
    ask(engine, text(40))
    before = engine.export_state().blocks
    for _ in range(3):
        record = engine.step()
        assert not record.rows and record.shape.tokens == 0
    assert engine.export_state().blocks == before
    assert ask(engine, text(40)).cache.num_skipped_tokens == 32


def test_a_match_is_not_evicted_by_its_own_admission(side: str) -> None:
    """The pool is exactly full; the oldest content is what the request matches."""
    engine = make_engine(MODEL, side, num_blocks=6)
    oldest, newer = text(2 * BLOCK), text(3 * BLOCK, seed=1)
    ask(engine, [*oldest, 1])
    ask(engine, [*newer, 1])
    assert len(engine.export_state().blocks.hashes) == 5
    outputs, run = serve_equal(engine, [branch(oldest, 6 * BLOCK - 4, seed=2)], FOUR)
    assert outputs[0].cache.num_skipped_tokens == 32
    plan = run.records[0].plan
    # The younger chain goes, its end first.
    assert plan.evicted_blocks == hash_blocks(newer)[::-1]
    assert sorted(plan.rows[0].block_table) == list(range(6))


def test_holders_that_end_in_one_step(side: str) -> None:
    """Two and three requests on one prefix end together; every count is right."""
    engine = make_engine(MODEL, side)
    stem = text(2 * BLOCK)
    ask(engine, [*stem, 1])
    _, run = serve_equal(engine, [branch(stem, 40, seed) for seed in range(3)], FOUR)
    assert len(run.records[-1].finished) == 3
    tables = [row.block_table[:2] for row in run.records[-1].rows]
    assert tables[0] == tables[1] == tables[2]
    assert_nothing_held(engine)


def test_ids_are_unique_after_a_reset(side: str) -> None:
    """A pool filled after a reset gives every block and slot to one request."""
    engine = make_engine(MODEL, side, num_blocks=8)
    serve_equal(engine, [text(20, seed) for seed in range(4)], FOUR)
    engine.add(text(20, seed=9), FOUR)
    engine.step()
    engine.reset()
    _, run = serve_equal(engine, [text(20, seed) for seed in range(4)], FOUR)
    rows = run.records[0].rows
    assert sorted(b for row in rows for b in row.block_table) == list(range(8))
    assert sorted(row.slot_id for row in rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("slots", [0, 1])
def test_too_few_slots_cost_snapshots_not_requests(side: str, slots: int) -> None:
    """With one slot or none, many prompts at once are still served right."""
    engine = make_engine(MODEL, side, snapshot_slots=slots)
    outputs, run = serve_equal(engine, [text(20, s) for s in range(8)], greedy(14))
    assert {output.finish_reason for output in outputs} == {"length"}
    planned = [sum(len(row.snapshots) for row in r.rows) for r in run.records]
    assert max(planned) == slots
    assert_nothing_held(engine)


def test_a_slot_pinned_by_a_restore_is_not_taken(side: str) -> None:
    """The only slot is being read in the step that wants one to write."""
    engine = make_engine(MODEL, side, snapshot_slots=1)
    stem = text(2 * BLOCK)
    ask(engine, branch(stem, 40, seed=1))
    outputs, run = serve_equal(engine, [branch(stem, 60, seed=2)], FOUR)
    first = run.records[0].rows[0]
    assert first.start == 32 and first.end == 60 and not first.snapshots
    assert ask(engine, branch(stem, 40, seed=3)).cache.num_skipped_tokens == 32
    assert len(outputs) == 1


def _weak_pair() -> tuple[list[int], list[int]]:
    tokens = [*text(BLOCK - 2), 7, 20]
    return tokens, [*tokens[:-2], 6, 51]


COLLISIONS = {
    "equal under a polynomial": _weak_pair(),
    "in another order": (text(BLOCK), text(BLOCK)[::-1]),
    "an earlier block differs": (
        text(BLOCK, 1) + text(BLOCK, 3),
        text(BLOCK, 2) + text(BLOCK, 3),
    ),
    "tokens that read alike": ([1, 11] * 8, [11, 1] * 8),
}


@pytest.mark.parametrize("case", COLLISIONS)
def test_different_prompts_never_share(side: str, case: str) -> None:
    """Prompts made to collide get outputs of their own."""
    one, other = COLLISIONS[case]
    engine = make_engine(MODEL, side)
    ask(engine, [*one, 5])
    assert ask(engine, [*one, 6]).cache.matched_kv_tokens == len(one)
    assert ask(engine, [*other, 5]).cache.matched_kv_tokens == 0
    assert ROOT_HASH not in hash_blocks(one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 64, "max_length": 64}, "lower block_size"),
        ({"snapshot_slots": 0}, "raise snapshot_slots"),
    ],
)
def test_a_cache_that_can_do_nothing_warns(
    side: str, options: dict[str, Any], message: str
) -> None:
    """A block no shorter than any request, or no slot for any state."""
    settings: dict[str, Any] = {"num_blocks": 8, "snapshot_slots": 2, **options}
    config = EngineConfig(**settings)
    with pytest.warns(UserWarning, match=message):
        LLM.from_config(
            MODEL,
            engine_config=config,
            backend=backend_of(side),
            device="cpu",
            verbose=False,
        )


def test_counters_tell_what_was_skipped(side: str) -> None:
    """What is reported, and what the steps really computed, add up to the prompt."""
    engine = make_engine(MODEL, side, max_tokens_per_step=128)
    for prompt in (text(50), text(50), branch(text(20), 50, 1), text(90)):
        outputs, run = serve_equal(engine, [prompt], FOUR)
        report = outputs[0].cache
        assert num_computed(run) - 3 == len(prompt) - report.num_skipped_tokens
        assert report == dataclasses.replace(
            reports_of(run, outputs[0].request_id)[0], differs_from=report.differs_from
        )
        assert report.reason
    assert report.num_skipped_tokens == 48


def test_siblings_of_a_long_prefix_hit(side: str) -> None:
    """Prompts that share a prefix and then differ: from the third on they skip it."""
    engine = make_engine(MODEL, side, max_tokens_per_step=256)
    stem = text(5 * BLOCK + 3)
    skips = [
        ask(engine, branch(stem, 120, seed)).cache.num_skipped_tokens
        for seed in range(4)
    ]
    assert skips == [0, 0, 80, 80]


def test_a_chat_outlives_older_one_off_prompts(side: str) -> None:
    """What is used least recently goes first, states and blocks alike."""
    engine = make_engine(MODEL, side, num_blocks=14, snapshot_slots=4)
    for seed in range(3):
        ask(engine, text(35, seed + 10))
    history = chat_turn(engine, [], text(30))
    chat = hash_blocks(history)
    blocks: list[BlockHash] = []
    states: list[BlockHash] = []
    for seed in range(3):
        _, run = serve_equal(engine, [text(35, seed + 20)], FOUR)
        blocks += [h for r in run.records for h in r.plan.evicted_blocks]
        states += [h for r in run.records for h in r.plan.evicted_states]
    assert blocks and not set(blocks) & set(chat)
    assert states and chat[2] not in states
    turn = ask(engine, [*history, *text(5, seed=3)])
    assert turn.cache.num_skipped_tokens == 48


def test_one_prompt_eight_times(side: str) -> None:
    """Together in one batch, cached or not, all give the same."""
    engine = make_engine(MODEL, side, max_requests=8, max_tokens_per_step=512)
    outputs, run = serve_equal(engine, [text(37)] * 8, greedy(6))
    assert max(record.shape.prefill_requests for record in run.records) == 7
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    # Without a cache, all eight are computed side by side.
    engine = make_engine(
        MODEL, side, max_requests=8, max_tokens_per_step=512, prefix_caching=False
    )
    others, run = serve_equal(engine, [text(37)] * 8, greedy(6))
    assert run.records[0].shape.prefill_requests == 8
    assert others[0].token_ids == outputs[0].token_ids


@pytest.mark.parametrize("pattern", ["M*", "*", "M"])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_full_hit_computes_at_least_a_token(
    side: str, pattern: str, cut: int
) -> None:
    """A prompt that is cached to its end, and one a token shorter."""
    engine = make_engine(tiny(pattern), side)
    prompt = text(3 * BLOCK)
    for _ in range(2):
        ask(engine, prompt[: 3 * BLOCK - cut])
    outputs, run = serve_equal(engine, [prompt[: 3 * BLOCK - cut]], FOUR)
    start, end = slices_of(run, outputs[0].request_id)[0]
    assert 0 < start < end == 3 * BLOCK - cut
    least = end - 1 if pattern == "*" and not cut else 2 * BLOCK
    assert start == least
    assert outputs[0].cache.num_skipped_tokens == start


def test_skipped_positions_have_no_log_probabilities(side: str) -> None:
    """What was not computed is not reported; what was is true.

    Log-probabilities of the prompt, asked for, are computed and not made up.
    """
    engine = make_engine(MODEL, side)
    ask(engine, text(40))
    outputs, run = serve_equal(engine, [branch(text(32), 45, seed=1)], FOUR)
    positions = run.logprobs[outputs[0].request_id]
    assert sorted(positions) == list(range(32, 48))
    assert all(bool(torch.isfinite(values).all()) for values in positions.values())
    asked = greedy(4, prompt_logprobs=2)
    fresh = make_engine(MODEL, side)
    warm, cold = (serve(each, [text(40)], asked)[0][0] for each in (engine, fresh))
    assert_reports(side, warm.prompt_logprobs, cold.prompt_logprobs)
    assert warm.cache.matched_kv_tokens == 32 and not warm.cache.num_skipped_tokens
    assert warm.cache.limit is SkipLimit.PROMPT_LOGPROBS


def test_a_slot_freed_mid_restore_serves_the_next(side: str) -> None:
    """Aborted in the step that restores it; another takes the slot at once."""
    answers: list[Any] = []
    base = part(side, "Model")

    def forward(self: Any, batch: Any, caches: Any) -> Any:
        if answers == []:
            answers.append(None)
        elif len(answers) == 1 and batch.shape.prefill_requests:
            answers.append(engine.abort("restored"))
        return base.forward(self, batch, caches)

    model = type("Model", (base,), {"forward": forward})
    engine = make_engine(MODEL, side, components={"model.Model": model}, max_requests=1)
    run = Run()
    engine.add(text(40), greedy(1), "seed")
    run.note(engine.step())
    engine.add(branch(text(32), 45, seed=1), FOUR, "restored")
    engine.add(text(20, seed=2), FOUR, "next")
    record = run.note(engine.step())
    assert record.rows[0].start == 32 and record.aborted == ["restored"]
    drain_equal(engine, {"seed": greedy(1), "restored": FOUR, "next": FOUR}, run)
    following = rows_of(run, "next")[0]
    assert following.slot_id == record.rows[0].slot_id
    assert following.initial_slot_id == engine.sizes.zero_slot
    assert_nothing_held(engine)


@pytest.mark.parametrize("length", [20, 27, 28, 29, 44])
def test_the_second_turn_computes_little(side: str, length: int) -> None:
    """At most a block of history and the new tokens, wherever the first turn ended."""
    engine = make_engine(MODEL, side, max_tokens_per_step=128)
    history, new = text(length), text(7, seed=1)
    for turn in range(3):
        prompt = [*history, *new]
        outputs, run = serve_equal(engine, [prompt], greedy(21))
        computed = slices_of(run, outputs[0].request_id)[0]
        if turn:
            # The last token of a turn is drawn, and not computed in that turn.
            assert computed[1] - computed[0] <= BLOCK + len(new)
            assert outputs[0].cache.differs_from is None
        history = [*prompt, *outputs[0].token_ids]


# Slots and memory.


def test_a_slot_used_before_starts_from_zero(side: str) -> None:
    """In every slot, after any number of other requests, also the very first."""
    engine = make_engine(MODEL, side, prefix_caching=False)
    seen: set[int] = set()
    for wave in range(3):
        _, run = serve_equal(engine, [text(9 + wave, seed) for seed in range(4)], FOUR)
        seen |= {row.slot_id for row in run.records[0].rows}
        assert len({row.slot_id for row in run.records[0].rows}) == 4
    assert seen == {0, 1, 2, 3}
    assert engine.sizes.dummy_slot not in seen and engine.sizes.zero_slot not in seen


def test_memory_nobody_wrote_is_not_read(side: str) -> None:
    """One token in a block full of NaN, one state in a slot full of NaN."""
    engine = make_engine(MODEL, side)
    serve_equal(engine, [text(40, seed) for seed in range(3)], FOUR)
    engine.reset()
    caches = engine.export_state().caches
    assert bool(caches.kv[:, :, 0].isnan().all() & caches.ssm[:, 0].isnan().all())
    outputs, run = serve_equal(engine, [[5]], greedy(20))
    values = torch.stack(list(run.logprobs[outputs[0].request_id].values()))
    assert bool(torch.isfinite(values).all())


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [30, 31, 32])
def test_a_preempted_request_equals_itself(
    side: str, length: int, caching: bool
) -> None:
    """Computed anew in prefill form, to the bit what decoding gave before."""
    engine = make_engine(MODEL, side, num_blocks=5, prefix_caching=caching)
    sampling = greedy(20, temperature=1.0)
    prompts = [text(length, seed) for seed in range(2)]
    outputs, run = serve_equal(engine, prompts, sampling)
    victim = outputs[1].request_id
    assert any(victim in record.plan.preempted for record in run.records)
    back = [row for row in rows_of(run, victim) if row.cache is not None]
    assert len(back) >= 2 and back[-1].end > length
    # Positions that were computed a second time were compared as well.
    assert back[-1].start < max(r.end for r in rows_of(run, victim)[:-1])


def test_what_fits_exactly_runs_and_what_does_not_is_told(side: str) -> None:
    """The last token drawn needs no place: 8 + 9 tokens fit into one block of 16."""
    engine = make_engine(MODEL, side, num_blocks=1)
    outputs, run = serve_equal(engine, [text(8)], greedy(9))
    assert max(row.end for row in rows_of(run, outputs[0].request_id)) == 16
    with pytest.raises(RequestError, match="17 tokens need 2 blocks of 16.*has 1"):
        engine.add(text(8), greedy(10))
    assert not engine.has_work


def test_an_oversize_request_blocks_nobody(side: str) -> None:
    """It is refused when it arrives, and the next one runs."""
    engine = make_engine(MODEL, side, num_blocks=3)
    with pytest.raises(RequestError, match="the pool has 3"):
        engine.add(text(60), FOUR)
    assert ask(engine, text(10)).finish_reason == "length"


def test_a_large_request_waits_at_the_head_and_runs(side: str) -> None:
    """One that needs the whole pool is not passed over for ever."""
    engine = make_engine(MODEL, side, num_blocks=4)
    sampling = {engine.add(text(10, 1), greedy(9)): greedy(9)}
    run = Run()
    run.note(engine.step())
    large = engine.add(text(61), FOUR)
    small = engine.add(text(5, 2), FOUR)
    sampling |= {large: FOUR, small: FOUR}
    record = run.note(engine.step())
    assert large in record.plan.blocked
    drain_equal(engine, sampling, run)
    admitted = [r.request_id for x in run.records for r in x.rows if r.cache]
    assert admitted.index(large) < admitted.index(small)


@pytest.mark.parametrize("scarce", ["blocks", "live slots"])
def test_admission_takes_all_or_nothing(side: str, scarce: str) -> None:
    """Refused for want of one resource, a request leaves the others as they were."""
    engine = make_engine(MODEL, side, num_blocks=4, max_requests=1)
    stem = text(2 * BLOCK)
    ask(engine, [*stem, 1])
    cache, before = engine.cache, engine.export_state()
    request = Request("r", branch(stem, 62, seed=1), FOUR, (), arrival=9)
    taken: list[int] = []
    if scarce == "blocks":
        taken = cache.blocks.allocate(1).block_ids
    else:
        taken = [cache.slots.allocate_live()]
    assert not cache.admit(request, StepPlan())
    if scarce == "blocks":
        cache.blocks.release(taken)
    else:
        cache.slots.free_live_slot(taken[0])
    after = engine.export_state()
    assert (request.block_table, request.slot_id) == ([], None)
    assert after.slots == before.slots
    assert sorted(after.blocks.free) == sorted(before.blocks.free)
    assert after.blocks.hashes == before.blocks.hashes
    engine.check_integrity()


def test_as_many_requests_as_slots(side: str) -> None:
    """Every live slot works at once; padding and warm-up need none of them."""
    engine = make_engine(MODEL, side, max_requests=3)
    _, run = serve_equal(engine, [text(12, seed) for seed in range(5)], FOUR)
    assert max(len(record.rows) for record in run.records) == 3
    blocked = [record.plan.blocked for record in run.records]
    assert "max_requests (3) are running" in blocked


def test_what_the_allocator_gave_does_not_change(side: str) -> None:
    """Ids handed out are the caller's own list."""
    pool = part(side, "BlockPool")(6, "lru")
    first = pool.allocate(3).block_ids
    kept = list(first)
    pool.release(first)
    pool.allocate(6)
    assert first == kept
    pool.release(list(range(6)))
    exported = pool.export_state()
    pool.allocate(2)
    assert len(exported.free) == 6


@pytest.mark.parametrize("pattern", ["***M", "M***", "MMM", "**", "-M-*-"])
def test_layers_of_one_kind_in_any_place(side: str, pattern: str) -> None:
    """Layers are counted among their own kind; a model may lack one kind."""
    engine = make_engine(tiny(pattern), side)
    ask(engine, text(40))
    again = ask(engine, branch(text(32), 45, seed=1))
    assert again.cache.num_skipped_tokens == 32


def test_a_suspended_engine_resumes(side: str) -> None:
    """Its state moved to another engine mid-run: both go on as one would have."""
    engine = make_engine(MODEL, side, max_tokens_per_step=24)
    run = Run()
    sampling = {engine.add(text(n, n), greedy(8)): greedy(8) for n in (10, 50, 20)}
    for _ in range(2):
        run.note(engine.step())
    state = engine.export_state()
    assert {request.state for request in state.running} == {"decode", "prefill"}
    twin = make_engine(MODEL, side, max_tokens_per_step=24)
    twin.import_state(state)
    copy = Run(logprobs={name: dict(v) for name, v in run.logprobs.items()})
    drain_equal(engine, sampling, run)
    engine.reset()
    drain_equal(twin, sampling, copy)
    assert len(copy.outputs) == 3
    assert ask(twin, text(50, 50)).cache.num_skipped_tokens == 48


def test_indices_beyond_32_bits(side: str) -> None:
    """A place in a pool of more than 2^31 tokens is exact."""
    engine = make_engine(MODEL, side)
    huge = dataclasses.replace(engine.sizes, num_blocks=2**30, max_length=64)
    builder = part(side, "MetadataBuilder")(huge, torch.device("cpu"))
    row = RowPlan("r", RowKind.PREFILL, 0, 20, True, 0, 0, [2**30 - 1, 2**29 + 1])
    request = Request("r", text(20), FOUR, (), arrival=1)
    batch = builder.build(StepPlan(rows=[row]), {"r": request}, False)
    found = [int(batch.kv_index[i]) for i in (0, 15, 16, 19)]
    assert found == [2**34 - 16, 2**34 - 1, 2**33 + 16, 2**33 + 19]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_states_are_kept_as_asked(side: str, name: str) -> None:
    """Float32 unless told otherwise, whatever the model's dtype; the option counts."""
    options: dict[str, Any] = {} if name == "float32" else {"ssm_state_dtype": name}
    engine = make_engine(tiny("M*", dtype="bfloat16"), side, **options)
    caches = engine.export_state().caches
    assert caches.ssm.dtype is getattr(torch, name)
    assert caches.conv.dtype is caches.kv.dtype is torch.bfloat16
    outputs, _ = serve(engine, [text(20)], FOUR)
    assert outputs[0].finish_reason == "length"


def test_time_steps_are_clamped(side: str) -> None:
    """Finite limits hold in prefill and decode, cached or not."""
    mamba = MODEL.mamba
    assert mamba is not None
    limited = tiny("M*", mamba=dataclasses.replace(mamba, time_step_limit=(0.2, 0.4)))
    engine = make_engine(limited, side)
    ask(engine, text(40))
    outputs, run = serve_equal(engine, [branch(text(32), 45, seed=1)], greedy(8))
    assert outputs[0].cache.num_skipped_tokens == 32
    free, other = serve(make_engine(MODEL, side), [outputs[0].prompt_token_ids], FOUR)
    mine = run.logprobs[outputs[0].request_id][44]
    assert not torch.equal(mine, other.logprobs[free[0].request_id][44])
    assert math.isinf(mamba.time_step_limit[1])


# Cut and packed prompts.


@pytest.mark.parametrize("pattern", ["M*", "M"])
@pytest.mark.parametrize("budget", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_a_prompt_cut_anywhere(side: str, budget: int, pattern: str) -> None:
    """Slices of any length give what one slice gives."""
    engine = make_engine(tiny(pattern), side, max_tokens_per_step=budget)
    outputs, run = serve_equal(engine, [text(50)], FOUR)
    assert len(slices_of(run, outputs[0].request_id)) >= 2


@pytest.mark.parametrize("more", [2, 5, 17])
def test_several_tokens_on_top_of_a_cache(side: str, more: int) -> None:
    """A row with history and several tokens is no decode: all of them count."""
    engine = make_engine(MODEL, side)
    stem = text(2 * BLOCK)
    ask(engine, [*stem, 1])
    outputs, run = serve_equal(engine, [branch(stem, 32 + more, seed=2)], FOUR)
    name = outputs[0].request_id
    assert slices_of(run, name) == [(32, 32 + more)]
    assert sorted(run.logprobs[name])[:more] == list(range(32, 32 + more))


def test_packed_prompts_do_not_touch(side: str) -> None:
    """Rows of 1, 2, 3 and 100 tokens side by side, in any order."""
    for lengths in ((1, 2, 3, 100), (100, 3, 2, 1), (3, 100, 1, 2)):
        engine = make_engine(MODEL, side, max_tokens_per_step=128)
        _, run = serve_equal(engine, [text(n, seed=n) for n in lengths], FOUR)
        assert [row.num_tokens for row in run.records[0].rows] == list(lengths)


def test_packed_prompts_with_states_to_start_from(side: str) -> None:
    """Several rows of one batch each start from a snapshot of their own."""
    engine = make_engine(MODEL, side, max_tokens_per_step=128)
    stems = [text(BLOCK * n, seed=n) for n in (1, 2, 3)]
    for stem in stems:
        ask(engine, [*stem, 1])
    prompts = [branch(stem, len(stem) + n, seed=n) for n, stem in enumerate(stems, 1)]
    _, run = serve_equal(engine, prompts, FOUR)
    rows = run.records[0].rows
    assert [(row.start, row.num_tokens) for row in rows] == [(16, 1), (32, 2), (48, 3)]
    assert len({row.initial_slot_id for row in rows}) == 3


@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_decode_after_a_prompt_uses_raw_inputs(side: str, length: int) -> None:
    """The window left by prefill is what decode would have left."""
    windows: list[torch.Tensor] = []
    for budget in (1, 64):
        engine = make_engine(tiny("M"), side, max_tokens_per_step=budget)
        name = engine.add(text(length), greedy(2))
        while engine.export_state().waiting or (
            engine.scheduler.find(name).num_computed < length
        ):
            engine.step()
        windows.append(engine.export_state().caches.conv[:, 0])
    assert_consistent(side, "model", windows[0], windows[1])
    # Raw inputs have both signs; an activation's outputs hardly reach below zero.
    assert windows[0].min() < -0.3


def test_idle_slots_are_not_written(side: str) -> None:
    """Rows in the first slots; all others keep every bit, in steps with padding too."""
    engine = make_engine(MODEL, side, debug=("integrity",), prefix_caching=False)
    names = [engine.add(text(10, seed), greedy(12)) for seed in range(4)]
    engine.step()
    for name in names[3:]:
        engine.abort(name)
    owned = {request.slot_id for request in engine.export_state().running}
    assert 0 in owned
    marked = engine.export_state()
    idle = [s for s in range(engine.sizes.dummy_slot) if s not in owned]
    for pool in marked.caches.tensors()[1:]:
        pool[:, [s for s in idle if s != engine.sizes.zero_slot]] = 7.0
    engine.import_state(marked)
    run = drain(engine)
    assert {len(record.rows) for record in run.records} == {3}
    for record in run.records:
        is_padded = record.mode in ("padded", "graph")
        assert (record.padded_shape != record.shape) == is_padded
    after = engine.export_state().caches
    for pool in (after.conv, after.ssm):
        kept = pool[:, [s for s in idle if s != engine.sizes.zero_slot]]
        assert bool((kept == 7.0).all())


def test_state_follows_its_request(side: str) -> None:
    """A row ends and others move up while one is in the middle of its prompt."""
    engine = make_engine(MODEL, side, max_tokens_per_step=20)
    sampling = {
        engine.add(text(length, length), greedy(n)): greedy(n)
        for length, n in ((4, 2), (5, 6), (60, 4))
    }
    run = drain_equal(engine, sampling)
    first, _, cut = sampling
    ending = first_ending(run.records, first)
    row = next(row for row in ending.rows if row.request_id == cut)
    assert row.kind is RowKind.PREFILL and row.end < 60
    following = run.records[run.records.index(ending) + 1]
    places = [
        [each.request_id for each in record.rows].index(cut)
        for record in (ending, following)
    ]
    assert places == [2, 1]


def test_a_resumed_row_beside_one_that_snapshots(side: str) -> None:
    """A hit with a suffix shorter than a scan chunk starts from its state too."""
    engine = make_engine(MODEL, side)
    stem = text(2 * BLOCK)
    ask(engine, [*stem, 1])
    prompts = [branch(stem, 37, seed=2), text(20, seed=3)]
    _, run = serve_equal(engine, prompts, FOUR)
    resumed, storing = run.records[0].rows
    assert (resumed.start, resumed.end, resumed.snapshots) == (32, 37, [])
    assert len(storing.snapshots) == 1


def test_every_pass_equals_the_first(side: str) -> None:
    """The same prompts five times, warm from the second on."""
    engine = make_engine(MODEL, side)
    prompts = [text(40), branch(text(32), 50, 1), text(33, 2)]
    passes: list[list[list[int]]] = []
    skipped: list[int] = []
    for _ in range(5):
        outputs, _ = serve_equal(engine, prompts, greedy(6))
        passes.append([output.token_ids for output in outputs])
        skipped.append(sum(output.cache.num_skipped_tokens for output in outputs))
    assert all(each == passes[0] for each in passes)
    assert skipped == [32, 112, 112, 112, 112]


def test_a_refused_admission_counts_nothing(side: str) -> None:
    """A request that waits for room is matched in earnest once."""
    engine = make_engine(MODEL, side, num_blocks=5)
    stem = text(2 * BLOCK)
    ask(engine, [*stem, 1])
    sampling = {engine.add(text(20, seed=1), greedy(8)): greedy(8)}
    run = Run()
    run.note(engine.step())
    waiting = engine.add(branch(stem, 70, seed=2), FOUR)
    sampling[waiting] = FOUR
    drain_equal(engine, sampling, run)
    assert sum(waiting in record.plan.blocked for record in run.records) >= 3
    assert len(reports_of(run, waiting)) == 1
    assert len(snapshots_of(run, waiting)) == 1


# Requests and sampling.


def test_names_in_flight_are_unique(side: str) -> None:
    """A name can be used again after its request ended, and not before."""
    engine = make_engine(MODEL, side)
    engine.add(text(10), FOUR, "mine")
    with pytest.raises(RequestError, match="'mine' is still in flight"):
        engine.add(text(5), FOUR, "mine")
    engine.step()
    with pytest.raises(RequestError, match="'mine' is still in flight"):
        engine.add(text(5), FOUR, "mine")
    engine.abort("mine")
    engine.add(text(12, seed=1), FOUR, "mine")
    run = drain_equal(engine, FOUR)
    assert run.outputs["mine"].prompt_token_ids == text(12, seed=1)
    # Names that the engine makes up keep out of the way.
    engine.add(text(5), FOUR, f"request-{engine.arrivals + 2}")
    made = [engine.add(text(5), FOUR) for _ in range(3)]
    assert len(set(made)) == 3 and len(drain_equal(engine, FOUR).outputs) == 4


def test_an_empty_prompt_is_refused(side: str) -> None:
    """Nobody else notices."""
    engine = make_engine(MODEL, side)
    name = engine.add(text(10), FOUR)
    engine.step()
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.add([], FOUR)
    assert drain_equal(engine, FOUR).outputs[name].finish_reason == "length"


@pytest.mark.parametrize("value", [-1, 0, 2.5, "4", True, None])
def test_impossible_limits_are_refused(side: str, value: Any) -> None:
    """A count is a whole number of at least one; the message names it."""
    with pytest.raises(RequestError, match="max_tokens is"):
        SamplingParams(max_tokens=value)
    assert make_engine(MODEL, side).has_work is False


def test_ignoring_the_end_token_ignores_that_alone(side: str) -> None:
    """The end token stops one request and not the other; the length stops both.

    Stop tokens end either, and count as tokens drawn just as the end token does.
    """
    plain = ask(make_engine(MODEL, side), text(10), greedy(8))
    end = plain.token_ids[2]
    model = tiny("M*", eos_token_ids=(end, 59))
    engine = make_engine(model, side)
    names = [engine.add(text(10), greedy(8, ignore_eos=i)) for i in (False, True)]
    run = drain(engine)
    stopped, going = (run.outputs[name] for name in names)
    first = plain.token_ids.index(end) + 1
    assert (stopped.finish_reason, going.finish_reason) == ("stop", "length")
    assert stopped.token_ids == plain.token_ids[:first]
    assert going.token_ids == plain.token_ids
    later = next(
        i for i in range(first, 8) if plain.token_ids[i] not in plain.token_ids[:i]
    )
    stops = [plain.token_ids[later]]
    for ignores, length in ((False, first), (True, later + 1)):
        sampling = greedy(8, ignore_eos=ignores, stop_token_ids=stops)
        (output,), _ = serve(engine, [text(10)], sampling)
        assert output.token_ids == plain.token_ids[:length]
        assert output.finish_reason == "stop"
    assert_nothing_held(engine)


def test_greedy_and_random_rows_in_one_batch(side: str) -> None:
    """Greedy takes the lowest of equals, always; a random row does not disturb it."""
    sample = part(side, "sample")
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [1.0, 3.0, 3.0, -torch.inf]])
    seen: set[tuple[int, ...]] = set()
    for seed in range(40):
        draws = make_draws(2, temperatures=[0.0, 1.0], seeds=seed, positions=[0, 1])
        drawn = sample(logits, draws)
        seen.add(tuple(drawn.tolist()))
    assert {greedy_token for greedy_token, _ in seen} == {1}
    assert {token for _, token in seen} == {0, 1, 2}
    engine = make_engine(MODEL, side)
    random = greedy(6, temperature=1.0, seed=3, top_k=9, top_p=0.8, min_p=0.01)
    sampling = {
        engine.add(text(10, seed=1), greedy(6)): greedy(6),
        engine.add(text(11, seed=2), random): random,
    }
    run = drain_equal(engine, sampling)
    assert all(record.shape.decode_requests in (0, 2) for record in run.records)


def test_greedy_with_filters_is_greedy(side: str) -> None:
    """Temperature 0 goes with any filter, and none of them changes a token."""
    plain = ask(make_engine(MODEL, side), text(10), greedy(8))
    for options in ({"top_p": 0.9}, {"top_k": 1}, {"min_p": 1.0, "top_k": 7}):
        filtered = ask(make_engine(MODEL, side), text(10), greedy(8, **options))
        assert filtered.token_ids == plain.token_ids
    assert SamplingParams(temperature=0, top_p=0.9).temperature == 0


def test_top_k_keeps_exactly_k(side: str) -> None:
    """Of three equal logits two stay, those with the lowest ids."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]]).expand(60, -1)
    draws = make_draws(60, temperatures=1.0, positions=list(range(60)), top_ks=2)
    assert set(part(side, "sample")(logits, draws).tolist()) == {1, 3}


def test_an_unset_seed_is_fresh_and_a_set_one_holds(side: str) -> None:
    """Two requests without a seed differ; with one seed they agree."""
    engine = make_engine(MODEL, side)
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    outputs, _ = serve(engine, [text(10)] * 2, free)
    assert outputs[0].token_ids != outputs[1].token_ids
    fixed = dataclasses.replace(free, seed=11)
    outputs, run = serve(engine, [text(10)] * 2, fixed)
    assert outputs[0].token_ids == outputs[1].token_ids
    for output in outputs:
        assert_equals_lone(MODEL, output, run, fixed)


def test_eviction_counts_whole_blocks(side: str) -> None:
    """One token more than fits costs one cached block, no more and no less."""
    engine = make_engine(MODEL, side, num_blocks=4)
    ask(engine, text(2 * BLOCK) + [1])
    _, run = serve_equal(engine, [text(2 * BLOCK + 1, seed=1)], greedy(2))
    evicted = [h for record in run.records for h in record.plan.evicted_blocks]
    assert evicted == [hash_blocks(text(2 * BLOCK))[1]]


def test_times_of_a_request_without_tokens(side: str) -> None:
    """Ended before its first token, or in the queue: no time, and no crash."""
    engine = make_engine(MODEL, side, max_tokens_per_step=BLOCK, max_requests=1)
    started = engine.add(text(40), FOUR)
    queued = engine.add(text(10), FOUR)
    engine.step()
    for name, was_admitted in ((started, True), (queued, False)):
        output = engine.abort(name)
        times = output.timings
        assert (times.first_token, times.per_token) == (None, None)
        assert (times.queue is not None) is was_admitted
        assert output.token_ids == []


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [(63, 1, True), (64, 1, False), (65, 1, False), (60, 4, True), (60, 5, False)],
)
def test_the_longest_request_is_stated_at_the_door(
    side: str, length: int, max_tokens: int, fits: bool
) -> None:
    """Prompt and output together; the next request works either way."""
    engine = make_engine(MODEL, side, max_length=64)
    if fits:
        output = ask(engine, text(length), greedy(max_tokens))
        assert len(output.token_ids) == max_tokens
    else:
        with pytest.raises(RequestError, match="max_length is 64"):
            engine.add(text(length), greedy(max_tokens))
    assert ask(engine, text(10, seed=1)).finish_reason == "length"
