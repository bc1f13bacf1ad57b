"""Exceptions, aborts and interrupts at every phase of a step.

One request in flight is named ``bad``; faults find it by its name, by three tokens in
its prompt or by its seed, whatever the phase has at hand.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig
from lockstep.errors import RequestError
from lockstep.plan import SkipLimit, StepPlan
from lockstep.request import FinishReason, Request, SamplingParams, Timings
from tests.engines import WITNESS, Run, greedy, lone, make_engine
from tests.scenarios.common import (
    BLOCK,
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    is_mixed,
    part,
    reports_of,
    rows_of,
    text,
    tiny,
    watched,
    watched_method,
)
from tests.tolerances import assert_reports

MODULE = "engine"

MODEL = tiny("M*")
SIX = greedy(6)
MARK = [60, 60, 60]
BAD_SEED = 666
BAD_PROMPT = [*text(20, seed=7, vocab_size=60), *MARK, *text(17, 8, vocab_size=60)]

PHASES = ("plan", "grow", "prepare", "forward", "commit", "sample", "update")
#: Phases that work on the whole batch, so that no request is at fault in plain sight.
BATCH_PHASES = ("prepare", "forward", "sample")
#: What a forward pass calls, and the requests that it is called for.
PARTS_OF_FORWARD = (
    "conv_prefill",
    "scan_prefill",
    "append_kv",
    "attend_prefill",
    "conv_decode",
    "scan_decode",
    "attend_decode",
    "copy_states",
)


class Trigger:
    """Acts when a phase comes to the bad request, or to anyone.

    Attributes:
        act: What happens.
        keyed: Whether only the bad request sets it off.
        times: How often it still acts.
        fired: How often it acted.
    """

    def __init__(
        self, act: Callable[[], None], keyed: bool = True, times: int = 99
    ) -> None:
        """Start ready to act."""
        self.act, self.keyed, self.times, self.fired = act, keyed, times, 0

    def __call__(self, is_bad: bool) -> None:
        """Act if it is time to."""
        if self.times and (is_bad or not self.keyed):
            self.times -= 1
            self.fired += 1
            self.act()


def boom() -> None:
    """Fail."""
    raise RuntimeError("boom")


def interrupt() -> None:
    """Be interrupted by the user."""
    raise KeyboardInterrupt


def interrupt_of(_: Any) -> None:
    """Be interrupted, whatever is given."""
    interrupt()


def parts_for(side: str, phase: str, trigger: Trigger) -> dict[str, Any]:
    """Return components that pull the trigger at a phase."""

    def of_request(request: Request, *_: Any) -> None:
        trigger(request.request_id == "bad")

    def prepare(plan: Any, requests: Any, *_: Any) -> None:
        trigger("bad" in requests)

    def forward(batch: Any, *_: Any) -> None:
        tokens = batch.token_ids.tolist()
        windows = (tokens[i : i + 3] for i in range(len(tokens)))
        trigger(MARK in windows)

    def sample(logits: Any, draws: Any) -> None:
        trigger(BAD_SEED in draws.seeds.tolist())

    methods: dict[str, tuple[str, str, str, Callable[..., None]]] = {
        "plan": ("prefix_cache", "PrefixCache", "admit", of_request),
        "grow": ("prefix_cache", "PrefixCache", "grow", of_request),
        "commit": ("prefix_cache", "PrefixCache", "commit", of_request),
        "prepare": ("metadata", "MetadataBuilder", "build", prepare),
        "forward": ("model", "Model", "forward", forward),
    }
    if phase in methods:
        module, name, method, watch = methods[phase]
        return {f"{module}.{name}": watched_method(side, name, method, watch)}
    if phase == "sample":
        return {"sampler.sample": watched(side, "sample", sample)}
    return {}


def watch_update(
    engine: Any, trigger: Trigger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pull the trigger when a token is noted for a request."""
    real = Timings.add_token

    def add_token(self: Timings) -> None:
        running = engine.export_state().running
        bad = [r for r in running if r.request_id == "bad"]
        trigger(any(r.timings.arrived == self.arrived for r in bad))
        real(self)

    monkeypatch.setattr(Timings, "add_token", add_token)


def start(
    side: str, phase: str, trigger: Trigger, patch: pytest.MonkeyPatch, **options: Any
) -> Any:
    """Build an engine whose phase has a trigger."""
    parts = parts_for(side, phase, trigger)
    engine = make_engine(MODEL, side, components=parts, **options)
    if phase == "update":
        watch_update(engine, trigger, patch)
    return engine


def sampling_of(name: str) -> SamplingParams:
    """Return how a request is sampled; the bad one is known by its seed."""
    return greedy(6, seed=BAD_SEED) if name == "bad" else SIX


def add_three(engine: Any, run: Run) -> dict[str, SamplingParams]:
    """Add a request, run a step, then add the bad one and a third."""
    sampling = {name: sampling_of(name) for name in ("first", "bad", "last")}
    prompts = {
        "first": text(20, seed=1, vocab_size=60),
        "bad": BAD_PROMPT,
        "last": text(20, seed=2, vocab_size=60),
    }
    for name, prompt in prompts.items():
        engine.add(prompt, sampling[name], name)
        if name == "first":
            run.note(engine.step())
    return sampling


def disarm(trigger: Trigger) -> None:
    """Let the trigger act no more."""
    trigger.times = 0


# Exceptions.


@pytest.mark.parametrize("budget", [128, 24])
@pytest.mark.parametrize("phase", PHASES)
def test_the_request_at_fault_ends_and_no_other(
    side: str, phase: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others finish as if alone, and the cache holds nothing that was not computed."""
    trigger = Trigger(boom)
    engine = start(side, phase, trigger, monkeypatch, max_tokens_per_step=budget)
    run = Run()
    sampling = add_three(engine, run)
    for _ in range(60):
        run.note(engine.step())
    assert not engine.has_work
    assert trigger.fired == (2 if phase in BATCH_PHASES else 1)
    failed = {name: text for r in run.records for name, text in r.failed.items()}
    assert failed == {"bad": "RuntimeError: boom"}
    assert any("first" in record.interrupted for record in run.records)
    output = run.outputs["bad"]
    assert (output.finish_reason, output.error) == ("error", failed["bad"])
    assert {name: o.finish_reason for name, o in run.outputs.items()} == {
        "first": "length",
        "bad": "error",
        "last": "length",
    }
    drain_equal(engine, sampling, run)
    assert_nothing_held(engine)
    disarm(trigger)
    assert ask(engine, BAD_PROMPT, SIX).finish_reason == "length"
    assert ask(engine, branch(BAD_PROMPT, 50, seed=1), SIX).error == ""


@pytest.mark.parametrize("phase", BATCH_PHASES)
@pytest.mark.parametrize("company", [True, False])
def test_a_fault_that_never_returns_ends_nobody(
    side: str, phase: str, company: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In company or alone: what was lost is computed again."""
    trigger = Trigger(boom, keyed=False, times=0)
    engine = start(side, phase, trigger, monkeypatch)
    run = Run()
    if company:
        sampling = add_three(engine, run)
    else:
        sampling = {engine.add(BAD_PROMPT, SIX, "only"): SIX}
    trigger.times = 1
    record = run.note(engine.step())
    assert trigger.fired == 1 and record.interrupted and not record.failed
    drain_equal(engine, sampling, run)
    assert {o.finish_reason for o in run.outputs.values()} == {FinishReason.LENGTH}
    assert_nothing_held(engine)


@pytest.mark.parametrize("name", PARTS_OF_FORWARD)
def test_a_forward_pass_that_stops_half_way(side: str, name: str) -> None:
    """States and K/V half written by any part of it are never read again."""
    trigger = Trigger(boom, keyed=False, times=0)
    real = part(side, name)

    def fails_after(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        trigger(True)
        return result

    modules = {"conv": "conv1d", "scan": "scan", "copy": "snapshots"}
    key = f"{modules.get(name.split('_')[0], 'attention')}.{name}"
    engine = make_engine(MODEL, side, components={key: fails_after})
    stem = text(2 * BLOCK, seed=5)
    ask(engine, [*stem, 1])
    run, sampling = Run(), {}
    # One row decodes onto a boundary, one restores, one begins; the last two store.
    for prompt in (text(BLOCK - 1, 1), branch(stem, 50, 2), text(20, 3)):
        sampling[engine.add(prompt, SIX)] = SIX
        if len(sampling) == 1:
            run.note(engine.step())
    trigger.times = 1
    record = run.note(engine.step())
    assert trigger.fired == 1 and len(record.interrupted) == 3
    assert [len(row.snapshots) for row in record.rows] == [1, 1, 1]
    assert is_mixed(record) and not record.registered_blocks
    drain_equal(engine, sampling, run)
    for output in list(run.outputs.values()):
        ask(engine, [*output.prompt_token_ids, *output.token_ids, 1])


@pytest.mark.parametrize("caching", [True, False])
def test_a_fault_in_a_later_slice_is_found(side: str, caching: bool) -> None:
    """Alone, the suspect must get past the token that failed, not only one slice on."""
    trigger = Trigger(boom)
    engine = make_engine(
        MODEL,
        side,
        components=parts_for(side, "forward", trigger),
        max_tokens_per_step=32,
        prefix_caching=caching,
    )
    engine.add([*text(38, seed=1, vocab_size=60), *MARK, 5], SIX, "bad")
    engine.add(text(60, seed=2, vocab_size=60), SIX, "good")
    run = Run()
    for _ in range(30):
        run.note(engine.step())
    failing = next(record for record in run.records if record.interrupted)
    assert {row.request_id: row.start > 0 for row in failing.rows} == {
        "bad": True,
        "good": False,
    }
    assert not engine.has_work
    drain_equal(engine, SIX, run)
    assert run.outputs["bad"].finish_reason == "error"
    assert run.outputs["good"].finish_reason == "length"


def test_a_plan_that_fails_for_nobody_is_the_callers(side: str) -> None:
    """An engine that cannot plan says so instead of trying for ever."""
    trigger = Trigger(boom, keyed=False, times=0)
    plan = watched_method(side, "Scheduler", "plan", lambda *_: trigger(True))
    engine = make_engine(MODEL, side, components={"scheduler.Scheduler": plan})
    run = Run()
    sampling = add_three(engine, run)
    trigger.times = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    drain_equal(engine, sampling, run)
    assert len(run.outputs) == 3


def test_log_probabilities_are_reported_once(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken in a step whose update fails, they are taken again, not added."""
    trigger = Trigger(boom)
    engine = start(side, "update", trigger, monkeypatch)
    for name in ("bad", "good"):
        engine.add(text(20, seed=len(name)), greedy(4, logprobs=2), name)
    run = Run()
    record = run.note(engine.step())
    assert record.interrupted == ["bad", "good"] and "good" in record.tokens
    drain_equal(engine, greedy(4, logprobs=2), run)
    for output in run.outputs.values():
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
    good = run.outputs["good"]
    truth, _ = lone(MODEL, good.prompt_token_ids, greedy(4, logprobs=2))
    assert_reports(side, good.logprobs, truth.logprobs)


# Interrupts.


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_leaves_the_engine_usable(
    side: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the caller; stepping on gives every request its result."""
    trigger = Trigger(interrupt, times=1)
    engine = start(side, phase, trigger, monkeypatch)
    run = Run()
    sampling = add_three(engine, run)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(60):
            run.note(engine.step())
    assert engine.has_work
    engine.check_integrity()
    drain_equal(engine, sampling, run)
    assert {o.finish_reason for o in run.outputs.values()} == {FinishReason.LENGTH}
    assert_nothing_held(engine)


def test_an_interrupted_generate_leaves_nothing_behind(side: str) -> None:
    """The prompts of the call are gone, and the next call is served."""
    trigger = Trigger(interrupt, keyed=False, times=1)
    llm = LLM.from_config(
        MODEL,
        weights=WITNESS,
        engine_config=EngineConfig(num_blocks=16, snapshot_slots=4),
        backend=side,
        device="cpu",
        components=parts_for(side, "forward", trigger),
        verbose=False,
    )
    prompts = [text(20, seed) for seed in range(2)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SIX)
    assert_nothing_held(llm.engine)
    outputs = llm.generate(prompts, SIX)
    for output in outputs:
        assert (
            output.token_ids == lone(MODEL, output.prompt_token_ids, SIX)[0].token_ids
        )


def test_an_interrupt_waits_for_the_end_of_a_step(side: str) -> None:
    """Nothing is half done; what finished in that step comes with the next record."""
    trigger = Trigger(partial(signal.raise_signal, signal.SIGINT), keyed=False, times=1)
    engine = make_engine(MODEL, side, components=parts_for(side, "forward", trigger))
    engine.add(text(20), greedy(1), "short")
    engine.add(text(20, 1), greedy(3), "long")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert trigger.fired and signal.getsignal(signal.SIGINT) is before
    engine.check_integrity()
    assert engine.scheduler.find("long").num_generated == 1
    record = engine.step()
    assert [output.request_id for output in record.finished] == ["short"]
    assert [len(o.token_ids) for o in (*record.finished, *engine.drain())] == [1, 3]
    assert_nothing_held(engine)


def test_a_second_interrupt_does_not_wait(side: str) -> None:
    """A step may take long."""
    ended: list[str] = []

    def twice() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        ended.append("the second waited, too")

    trigger = Trigger(twice, keyed=False, times=1)
    engine = make_engine(MODEL, side, components=parts_for(side, "forward", trigger))
    engine.add(text(20), greedy(2), "a")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not ended and engine.has_work
    assert len(engine.drain()) == 1


def test_what_had_finished_when_a_step_failed_is_not_lost(side: str) -> None:
    """Even if it was the last; a stream gets its output, too."""
    engine = make_engine(MODEL, side)
    engine.add(text(20), greedy(1), "a")
    finish, engine._finish_aborted = engine._finish_aborted, interrupt_of
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._finish_aborted = finish
    assert engine.has_work and not engine.scheduler.has_work
    assert [output.request_id for output in engine.drain()] == ["a"]
    assert not engine.has_work


def test_a_stream_that_is_given_up_claims_its_output(side: str) -> None:
    """What finished in the step that was interrupted is of no use to others."""
    trigger = Trigger(partial(signal.raise_signal, signal.SIGINT), keyed=False, times=1)
    parts = parts_for(side, "forward", trigger)
    llm = LLM.from_config(
        MODEL, backend=side, device="cpu", components=parts, verbose=False
    )
    with pytest.raises(KeyboardInterrupt):
        llm.generate(text(20), greedy(1))
    assert trigger.fired and not llm.engine.has_work
    (output,) = llm.generate(text(20), greedy(2))
    assert len(output.token_ids) == 2


def test_a_reset_waits_for_no_step(side: str) -> None:
    """In the midst of one it is refused, and nothing is harmed."""
    engine = make_engine(MODEL, side)
    refused: list[str] = []
    forward = engine._forward

    def reset_then_forward(*given: Any) -> Any:
        with pytest.raises(RequestError, match="a step is running") as error:
            engine.reset()
        refused.append(str(error.value))
        return forward(*given)

    engine._forward = reset_then_forward
    engine.add(text(20), greedy(2), "a")
    assert len(engine.drain()) == 1 and len(refused) == 2
    engine.reset()
    engine.check_integrity()


# Aborts.


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_during_a_step_waits_for_its_end(
    side: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is not taken from under a step; its record has the output."""
    answers: list[Any] = []
    trigger = Trigger(lambda: answers.append(engine.abort("bad")), times=1)
    engine = start(side, phase, trigger, monkeypatch)
    run = Run()
    sampling = add_three(engine, run)
    drain_equal(engine, sampling, run)
    assert answers == [None]
    ended = [record for record in run.records if record.aborted]
    assert [record.aborted for record in ended] == [["bad"]]
    assert "bad" in [row.request_id for row in ended[0].rows]
    assert run.outputs["bad"].finish_reason == "abort"
    assert run.outputs["first"].finish_reason == "length"
    assert_nothing_held(engine)
    # What it computed before the end of the step is real, and may be used.
    assert ask(engine, BAD_PROMPT, SIX).cache.num_skipped_tokens == 32


def test_a_request_that_ends_by_itself_is_not_aborted(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted in the step that gives its last token, it is complete."""
    trigger = Trigger(lambda: engine.abort("bad"), times=1)
    engine = start(side, "sample", trigger, monkeypatch)
    engine.add(BAD_PROMPT, greedy(1, seed=BAD_SEED), "bad")
    record = engine.step()
    assert trigger.fired == 1 and not record.aborted
    assert [output.finish_reason for output in record.finished] == ["length"]
    assert_nothing_held(engine)


def test_an_abort_that_meets_an_interrupt_still_counts(side: str) -> None:
    """Asked for in a step that never ended, it takes effect in the next."""

    def abort_and_interrupt() -> None:
        engine.abort("bad")
        raise KeyboardInterrupt

    trigger = Trigger(abort_and_interrupt, times=1)
    parts = parts_for(side, "forward", trigger)
    engine = make_engine(MODEL, side, components=parts)
    run = Run()
    sampling = add_three(engine, run)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    drain_equal(engine, sampling, run)
    assert run.outputs["bad"].finish_reason == "abort"
    assert len(run.outputs["bad"].token_ids) <= 1


def test_a_request_put_off_outlives_its_donor(side: str) -> None:
    """The one whose prefix it waits for is aborted half way."""
    engine = make_engine(MODEL, side, max_tokens_per_step=40)
    prompt = text(70)
    donor = engine.add(prompt, SIX)
    run = Run()
    run.note(engine.step())
    heir = engine.add(prompt, SIX)
    assert rows_of(run, donor)[0].end == 32
    engine.abort(donor)
    record = run.note(engine.step())
    assert record.rows[0].request_id == heir and record.rows[0].start == 32
    drain_equal(engine, SIX, run)
    # And the donor aborted in the very step in which the other was put off:
    trigger = Trigger(lambda: engine.abort("bad"), times=1)
    parts = parts_for(side, "prepare", trigger)
    engine = make_engine(MODEL, side, components=parts, max_tokens_per_step=128)
    run = Run()
    engine.add(prompt, SIX, "bad")
    heir = engine.add(prompt, SIX)
    record = run.note(engine.step())
    assert record.plan.deferred == [heir] and record.aborted == ["bad"]
    drain_equal(engine, SIX, run)
    assert reports_of(run, heir)[0].num_skipped_tokens == 64


def test_a_thousand_aborts_leak_nothing(side: str) -> None:
    """Queued, put off, mid-prompt, restored, decoding: all memory comes back."""

    def blank(self: Any, batch: Any, caches: Any) -> torch.Tensor:
        return torch.zeros(len(batch.logit_index), MODEL.vocab_size)

    # What the model says does not matter here, so it is not asked.
    model = type("Model", (part(side, "Model"),), {"forward": blank})
    engine = make_engine(
        MODEL,
        side,
        components={"model.Model": model},
        max_tokens_per_step=24,
        max_requests=2,
        num_blocks=6,
        snapshot_slots=2,
        record_logprobs=False,
        debug=(),
    )
    phases: list[str] = []
    for loop in range(1000):
        seed = loop % 11 if loop % 2 else 0
        prompt = text(17 + 5 * (loop % 3), seed)
        names = [engine.add(prompt, SIX) for _ in range(1 + loop % 3)]
        records = [engine.step() for _ in range(loop % 4)]
        last = records[-1].plan if records else StepPlan()
        phases += [row.kind for row in last.rows if row.request_id in names]
        phases += ["queued"] * (not records) + ["put off"] * bool(last.deferred)
        phases += ["restored"] * any(row.cache and row.start for row in last.rows)
        for name in names:
            output = engine.abort(name)
            assert output is not None and output.finish_reason == "abort"
        if loop % 20 == 0:
            assert_nothing_held(engine)
    assert_nothing_held(engine)
    count = {phase: phases.count(phase) for phase in set(phases)}
    assert len(count) == 5 and min(count.values()) >= 50, count
    assert ask(make_engine(MODEL, side), text(17), SIX).finish_reason == "length"


def test_an_abort_of_nobody_is_ignored(side: str) -> None:
    """Unknown, finished or aborted twice: no answer and no harm."""
    engine = make_engine(MODEL, side)
    assert engine.abort("nobody") is None
    name = engine.add(text(5), SIX)
    assert engine.abort(name) is not None
    assert engine.abort(name) is None
    with pytest.raises(RequestError):
        engine.add([], SIX)
    assert_nothing_held(engine)
    assert ask(engine, text(5), SIX).cache.limit is SkipLimit.SHORT_PROMPT
