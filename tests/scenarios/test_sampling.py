"""Sampling in an engine: company, ends, and log-probabilities of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import PlanError
from lockstep.plan import SkipLimit
from lockstep.request import FinishReason, RequestOutput, SamplingParams
from tests.engines import Run, drain, greedy, lone, make_engine, serve
from tests.scenarios.common import (
    BLOCK,
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    part,
    reports_of,
    slices_of,
    text,
    tiny,
    watched,
)
from tests.tolerances import assert_reports
from tests.traces import reported

MODULE = "engine"

MODEL = tiny("M*", eos_token_ids=(60,))
FOUR = greedy(4)
EXAMPLES = settings().max_examples
#: A random row with every filter.
FILTERED = greedy(
    12, temperature=0.9, seed=7, top_k=20, top_p=0.9, min_p=0.02, min_tokens=3
)


def assert_reports_are_true(
    side: str, output: RequestOutput, sampling: SamplingParams
) -> None:
    """Compare what was reported of a prompt with the lone run's log-probabilities."""
    plain = replace(sampling, prompt_logprobs=None, prompt_logprobs_from=0)
    prompt, first = output.prompt_token_ids, sampling.prompt_logprobs_from
    _, truth = lone(MODEL, prompt, plain)
    count = sampling.prompt_logprobs
    assert count is not None
    expected = [
        reported(truth[p - 1], prompt[p], count) if p else None
        for p in range(first, len(prompt))
    ]
    assert_reports(side, output.prompt_logprobs, expected)


# Company.


@settings(max_examples=max(1, EXAMPLES // 2))
@given(
    others=st.lists(st.integers(1, 40), max_size=3),
    place=st.integers(0, 3),
    budget=st.sampled_from([3, 16, 64]),
    blocks=st.sampled_from([4, 5, 32]),
)
def test_neighbours_change_no_token(
    side: str, others: list[int], place: int, budget: int, blocks: int
) -> None:
    """A seeded row is the same in any company and order, preempted or not."""
    engine = make_engine(
        MODEL, side, max_tokens_per_step=budget, num_blocks=blocks, max_requests=4
    )
    run, prompt = Run(), text(21, seed=3)
    sampling: dict[str, SamplingParams] = {}
    requests: list[tuple[list[int], SamplingParams]] = [
        (text(length, seed=50 + index), replace(FILTERED, seed=index, top_p=0.5))
        for index, length in enumerate(others)
    ]
    requests.insert(place, (prompt, FILTERED))
    for tokens, params in requests:
        sampling[engine.add(tokens, params)] = params
    drain_equal(engine, sampling, run)


def test_a_preempted_random_row_goes_on_as_before(side: str) -> None:
    """Every filter on, sent back in the midst of decoding: the same tokens."""
    engine = make_engine(MODEL, side, num_blocks=4)
    prompts = [text(20, seed) for seed in range(3)]
    params = [replace(FILTERED, seed=seed, max_tokens=20) for seed in range(3)]
    sampling = {
        engine.add(prompt, mine): mine
        for prompt, mine in zip(prompts, params, strict=True)
    }
    run = drain_equal(engine, sampling)
    assert any(record.plan.preempted for record in run.records)


# Ends.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_blocks_every_end_id(side: str, temperature: float) -> None:
    """End-of-sequence and stop tokens alike; the next token may end it at once."""
    options = {"temperature": temperature, "seed": 5}
    plain = ask(make_engine(tiny("M*"), side), text(10), greedy(12, **options))
    ends = plain.token_ids[:2]
    model = tiny("M*", eos_token_ids=(ends[0],))
    # Nearly all tokens end it, so that one comes as soon as it may.
    stops = [ends[1], *range(3, 58)]
    for least in (0, 1, 5, 12):
        sampling = greedy(
            12, ignore_eos=False, stop_token_ids=stops, min_tokens=least, **options
        )
        engine = make_engine(model, side)
        (output,), _ = serve(engine, [text(10)], sampling)
        early = output.token_ids[:least]
        assert not set(early) & {ends[0], *stops}
        assert len(output.token_ids) >= max(1, least)
        if least < 12:
            assert (output.finish_reason == "stop") is (
                output.token_ids[-1] in {ends[0], *stops}
            )
        assert_nothing_held(engine)


def test_an_end_beyond_the_vocabulary_is_never_drawn(side: str) -> None:
    """Some checkpoints name one; it blocks nothing, and does no harm."""
    model = tiny("M*", eos_token_ids=(60, 10**6))
    sampling = greedy(6, ignore_eos=False, min_tokens=3)
    (output,), _ = serve(make_engine(model, side), [text(10)], sampling)
    (expected,), _ = serve(make_engine(MODEL, side), [text(10)], sampling)
    assert output.token_ids == expected.token_ids and not output.error


def test_min_tokens_blocks_no_longer_than_asked(side: str) -> None:
    """The first end id that may come ends it, and no later one."""
    plain = ask(make_engine(MODEL, side), text(10), greedy(12)).token_ids
    place = next(i for i in range(3, 12) if plain[i] not in plain[:i])
    for least in (0, place - 1, place, place + 1):
        sampling = greedy(12, stop_token_ids=[plain[place]], min_tokens=least)
        (output,), _ = serve(make_engine(MODEL, side), [text(10)], sampling)
        if least <= place:
            assert output.token_ids == plain[: place + 1]
            assert output.finish_reason == "stop"
        else:
            assert output.token_ids[:place] == plain[:place]
            assert output.token_ids[place] != plain[place]


def test_a_request_ended_for_its_text_has_stopped(side: str) -> None:
    """Only its caller can see a stop string; the reason is the caller's to give."""
    engine = make_engine(MODEL, side)
    name, other = engine.add(text(10), greedy(9)), engine.add(text(12), FOUR)
    run = Run()
    for _ in range(3):
        run.note(engine.step())
    output = engine.abort(name, FinishReason.STOP)
    assert output.finish_reason == "stop" and len(output.token_ids) == 3
    drain_equal(engine, FOUR, run)
    assert run.outputs[other].finish_reason == "length"
    assert_nothing_held(engine)


def test_a_request_ended_within_a_step_has_stopped(side: str) -> None:
    """With the token of that step, in whose record the output is."""
    answers: list[Any] = []

    def sample(*_: Any) -> None:
        answers.append(engine.abort("ended", reason=FinishReason.STOP))

    parts = {"sampler.sample": watched(side, "sample", sample)}
    engine = make_engine(MODEL, side, components=parts)
    engine.add(text(10), greedy(9), "ended")
    record = engine.step()
    assert answers == [None] and record.aborted == ["ended"]
    (output,) = record.finished
    assert output.finish_reason == "stop" and len(output.token_ids) == 1
    assert_nothing_held(engine)


# Log-probabilities of prompts.


@pytest.mark.parametrize("record_logprobs", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 16, 64])
@pytest.mark.parametrize("first", [0, 1, 15, 16, 17, 39])
def test_a_prompt_is_reported_from_a_position_on(
    side: str, first: int, budget: int, record_logprobs: bool
) -> None:
    """However the prompt is cut, whatever else is recorded."""
    engine = make_engine(
        MODEL, side, max_tokens_per_step=budget, record_logprobs=record_logprobs
    )
    sampling = greedy(2, prompt_logprobs=3, prompt_logprobs_from=first)
    (output,), _ = serve(engine, [text(40)], sampling)
    assert_reports_are_true(side, output, sampling)
    none = ask(make_engine(MODEL, side), text(40), greedy(1))
    assert none.prompt_logprobs is None


def test_a_prompt_of_one_token_has_nothing_to_report(side: str) -> None:
    """Its token follows nothing."""
    sampling = greedy(1, prompt_logprobs=2)
    (output,), _ = serve(make_engine(MODEL, side), [[5]], sampling)
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("layers", ["M*", "*", "M"])
@pytest.mark.parametrize(
    ("first", "with_state", "without"),
    [(0, 0, 0), (1, 0, 0), (16, 0, 15), (17, 16, 16), (32, 16, 31), (33, 32, 32)],
)
def test_what_is_asked_for_is_computed_not_skipped(
    side: str, layers: str, first: int, with_state: int, without: int
) -> None:
    """The cache goes no further than the token before, says so, and stays as it is."""
    engine = make_engine(tiny(layers), side)
    prompt = text(45)
    for length in (17, 45):
        ask(engine, prompt[:length])
    before = engine.export_state()
    sampling = greedy(3, prompt_logprobs=2, prompt_logprobs_from=first)
    name = engine.add(prompt, sampling)
    run = drain(engine)
    output, skipped = run.outputs[name], with_state if "M" in layers else without
    assert output.cache.num_skipped_tokens == skipped
    assert slices_of(run, name) == [(skipped, 45)]
    assert output.cache.matched_kv_tokens == 32
    if skipped < 32:
        assert output.cache.limit is SkipLimit.PROMPT_LOGPROBS
        at = max(first, 1)
        assert f"from position {at} on" in output.cache.reason
        assert f"the next usable position is {skipped}" in output.cache.reason
        assert output.cache.reason.startswith("32 of 45 tokens are known")
    else:
        assert output.cache.limit is SkipLimit.ALL_MATCHED
    # Shared blocks are read, not written; checksums of their content hold, too.
    after = engine.export_state()
    assert after.blocks.hashes.items() >= before.blocks.hashes.items()
    plain = tiny(layers)
    (truth,), _ = serve(make_engine(plain, side), [prompt], sampling)
    assert_reports(side, output.prompt_logprobs, truth.prompt_logprobs)
    assert output.token_ids == truth.token_ids


def test_reports_outlive_a_preemption_and_come_once(side: str) -> None:
    """Preempted in the midst of its prompt and while it decodes."""
    engine = make_engine(MODEL, side, max_tokens_per_step=10, num_blocks=6)
    sampling = greedy(20, prompt_logprobs=1)
    older = engine.add(text(30, seed=1), replace(FOUR, max_tokens=30))
    younger = engine.add(text(40, seed=2), sampling)
    run = drain(engine)
    assert any(record.plan.preempted == [younger] for record in run.records)
    assert len(reports_of(run, younger)) >= 2
    assert_reports_are_true(side, run.outputs[younger], sampling)
    noted = [r.prompt_reported.get(younger, []) for r in run.records]
    assert sum(len(each) for each in noted) == 39
    assert run.outputs[older].prompt_logprobs is None
    # What was reported need not be computed again, so it may be skipped.
    first, *later = reports_of(run, younger)
    assert first.num_skipped_tokens == 0
    assert any(report.num_skipped_tokens for report in later)


def test_only_what_is_needed_gets_logits(side: str) -> None:
    """Without records, one row of logits for each token reported or drawn."""
    counts: list[int] = []
    base: Any = part(side, "MetadataBuilder")

    class Counting(base):
        def build(self, *args: Any) -> Any:
            batch = super().build(*args)
            counts.append(batch.num_logits)
            return batch

    engine = make_engine(
        MODEL,
        side,
        components={"metadata.MetadataBuilder": Counting},
        record_logprobs=False,
        max_tokens_per_step=16,
    )
    sampling = greedy(2, prompt_logprobs=0, prompt_logprobs_from=20)
    serve(engine, [text(40)], sampling)
    # Positions 19 to 38 report tokens 20 to 39; position 39 and the next draw.
    assert counts == [0, 13, 8, 1]


def test_an_abort_keeps_what_was_reported(side: str) -> None:
    """A prompt that got half way has half its reports."""
    engine = make_engine(MODEL, side, max_tokens_per_step=16)
    sampling = greedy(2, prompt_logprobs=1)
    name = engine.add(text(40), sampling)
    engine.step()
    output = engine.abort(name)
    (whole,), _ = serve(make_engine(MODEL, side), [text(40)], sampling)
    assert whole.prompt_logprobs is not None
    assert_reports(side, output.prompt_logprobs, whole.prompt_logprobs[:17])


def test_a_failed_step_reports_nothing_twice(side: str) -> None:
    """Sampling fails once, after a slice whose K/V is cached by then."""
    fails = [True]

    def sample(*_: Any) -> None:
        if fails:
            fails.pop()
            raise RuntimeError("boom")

    parts = {"sampler.sample": watched(side, "sample", sample)}
    engine = make_engine(MODEL, side, components=parts, max_tokens_per_step=16)
    sampling = greedy(3, prompt_logprobs=2)
    name = engine.add(text(40), sampling)
    output = drain(engine).outputs[name]
    assert not fails and output.finish_reason == "length"
    assert_reports_are_true(side, output, sampling)


def test_a_plan_that_skips_what_is_asked_for_is_refused(side: str) -> None:
    """A recorded plan may not skip positions that this request must report."""
    plans: list[Any] = []
    for sampling in (FOUR, replace(FOUR, prompt_logprobs=1)):
        engine = make_engine(MODEL, side)
        ask(engine, text(40))
        engine.add(text(40), sampling, "again")
        if not plans:
            plans.append(engine.step().plan)
            continue
        with pytest.raises(PlanError, match="skips 32 of 40 .* after token 0"):
            engine.step(plan=plans[0])


def test_log_probabilities_are_those_of_the_model(side: str) -> None:
    """Before bans, temperature and filters; ties are listed by lowest id."""
    sampling = greedy(
        3, temperature=2.0, top_k=1, min_tokens=3, stop_token_ids=[4], logprobs=61
    )
    (output,), run = serve(make_engine(MODEL, side), [text(10)], sampling)
    positions = run.logprobs[output.request_id]
    assert output.logprobs is not None
    for index, report in enumerate(output.logprobs):
        values = positions[9 + index]
        assert_reports(side, [report], [reported(values, output.token_ids[index], 61)])
        assert torch.isfinite(values).all()
    parts = {"sampler.log_probabilities": torch.zeros_like}
    engine = make_engine(MODEL, side, components=parts)
    (output,), _ = serve(engine, [text(10)], greedy(1, logprobs=3))
    assert output.logprobs is not None
    assert set(output.logprobs[0]) == {output.token_ids[0], 0, 1, 2}


def test_a_branch_reports_its_own_tokens(side: str) -> None:
    """Siblings in one step share blocks; each reports what follows its own stem."""
    engine = make_engine(MODEL, side, record_logprobs=False)
    stem = text(2 * BLOCK)
    for length in (17, 32):
        serve(engine, [[*stem[:length], 1]], FOUR)
    sampling = greedy(3, prompt_logprobs=1, prompt_logprobs_from=30)
    prompts = [branch(stem, 40, seed=seed) for seed in range(3)]
    outputs, run = serve(engine, prompts, sampling)
    assert max(len(record.prompt_reported) for record in run.records) > 1
    for output in outputs:
        assert_reports_are_true(side, output, sampling)
