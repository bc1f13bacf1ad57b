"""Runs a workload on two engines, and finds the component to blame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lockstep.assemble import OPTIMIZED_ONLY
from lockstep.config import ModelConfig
from lockstep.errors import ConfigError, RequestError
from lockstep.request import SamplingParams
from lockstep.trace import StepRecord

from .compare import Judge, Parts, row_errors
from .observe import Observer, Outcome, Start
from .recorder import Recorder, Tape
from .report import LAYERS, Difference, Verdict, events_of
from .sides import Setup, Side, in_float64, make_setup
from .workload import Workload, draw_arrivals

#: Number of a step, and names, prompts and sampling of the requests that come before.
Given = tuple[int, list[tuple[str, list[int], SamplingParams]]]


def verify(
    subject: str | Side = "optimized",
    components: Parts | None = None,
    *,
    oracle: str | Side = "reference",
    model: str | ModelConfig = "demo",
    workload: Workload | None = None,
    device: str = "cpu",
    free_running: bool = False,
    bitwise: bool = False,
    truth: bool = False,
    **options: Any,
) -> Verdict:
    """Run two engines step by step, up to the first difference.

    Args:
        subject: Backend to be judged, or a `Side`.
        components: Components of it that are replaced.
        oracle: Backend that is right, or a `Side`.
        model: ``demo``, a checkpoint folder, or a config, which is then filled with
            random weights under which a wrong state is seen.
        workload: What both are given; a few drawn requests unless set.
        device: Where both run.
        free_running: Whether the subject goes on from its own state.
        bitwise: Whether floats are compared bit by bit: where both compute in the same
            shapes and order.
        truth: Whether the reference runs in float64, too, to say how far off both are.
        options: Further options of `EngineConfig`; those that only the optimized
            backend has go to the subject alone.

    Raises:
        ConfigError: A side, component or option that does not exist.
    """
    judged = Side(subject) if isinstance(subject, str) else subject
    alone = {name: options.pop(name) for name in OPTIMIZED_ONLY if name in options}
    judged = replace(
        judged,
        components={**judged.components, **(components or {})},
        options={**judged.options, **alone},
    )
    sides = Side(oracle) if isinstance(oracle, str) else oracle, judged
    verdict = Verdict(str(sides[0]), str(sides[1]))
    workload = workload or Workload(draw_arrivals(8, seed=1))
    setup = make_setup(model, {**workload.options, **options}, torch.device(device))
    Run(setup, sides, workload, free_running, bitwise, truth).go(verdict)
    return verdict


class Listened:
    """An engine whose components are listened to, under a workload."""

    def __init__(
        self, setup: Setup, side: Side, workload: Workload, parts: Parts | None = None
    ) -> None:
        """Build it, with every component wrapped; those of its side unless given."""
        self.workload = workload
        self.parts = side.parts(setup) if parts is None else parts
        self.recorder = Recorder(setup.parameters)
        self.engine = side.build(setup, self.recorder.wrap(self.parts))
        self.recorder.follow(self.engine.model)

    def run(
        self, given: Given, start: Start | None = None, lead: StepRecord | None = None
    ) -> Outcome:
        """Take one step.

        Args:
            given: What comes before it.
            start: Where to begin; where the engine stands unless set.
            lead: The oracle's record, whose tokens are followed; its plan too, unless
                the engine goes on from where it stands.
        """
        engine, record, error = self.engine, None, ""
        goes_on = lead is not None and start is None
        if start is not None:
            start.give(engine)
        step, arrivals = given
        added = [_add(engine, *each) for each in arrivals]
        answers = [added, self.workload.before and self.workload.before(engine, step)]
        ready = replace(engine.export_state(), caches=None)
        own_plan = "" if goes_on else _plan_of(engine)
        self.recorder.tape = tape = Tape()
        plan = None if lead is None or goes_on else lead.plan
        try:
            record = engine.step(plan, {} if lead is None else lead.tokens)
        except Exception as caught:
            if lead is None:
                raise
            error = f"{type(caught).__name__}: {caught}"
        if goes_on:
            # To ask before would be to undo it, and with it whatever is kept.
            own_plan = error if record is None else record.plan
        return Outcome(answers, ready, own_plan, record, error, tape, Start.of(engine))


class Run:
    """One workload on two engines, and on a third in float64 if asked for."""

    def __init__(
        self,
        setup: Setup,
        sides: tuple[Side, Side],
        workload: Workload,
        free_running: bool,
        bitwise: bool,
        truth: bool,
    ) -> None:
        """Build the engines."""
        self.setup, self.workload = setup, workload
        self.oracle, self.subject = sides
        self.free_running, self.bitwise = free_running, bitwise
        self.first, self.second = (Listened(setup, side, workload) for side in sides)
        exact = Listened(in_float64(setup), Side(), workload) if truth else None
        self.truth, self.waiting = exact, dict(enumerate(workload.arrivals))

    def go(self, verdict: Verdict) -> None:
        """Run to the end, or to the first difference."""
        while self.waiting or self.first.engine.has_work:
            verdict.steps += 1
            given = verdict.steps, [*self._arrivals(verdict.steps)]
            start = Start.of(self.first.engine)
            begin = Start.of(self.second.engine) if self.free_running else start
            expected = self.first.run(given)
            asked = None if self.free_running else start
            actual = self.second.run(given, asked, self._lead(expected))
            verdict.events.update(events_of(expected.record, actual.record))
            if self.truth is not None:
                exact = self.truth.run(given, start, expected.record)
                self._measure(verdict, exact, expected, actual)
            found = self._judge(self.second.parts, expected, actual, verdict)
            if found is not None:
                blame = self._bisect(given, begin, expected)
                verdict.difference = replace(found, step=verdict.steps, blame=blame)
                return

    def _lead(self, expected: Outcome) -> StepRecord:
        """Say what the subject is to follow: by the bit, it draws its own tokens."""
        assert expected.record is not None
        return replace(expected.record, tokens={}) if self.bitwise else expected.record

    def _arrivals(self, step: int) -> Iterator[tuple[str, list[int], SamplingParams]]:
        """Make requests of what is due, for this model's vocabulary."""
        scheduler, vocab = (
            self.first.engine.scheduler,
            self.setup.model_config.vocab_size,
        )
        busy = {each.request_id for each in scheduler.running + scheduler.waiting}
        busy.update(f"r{index}" for index in self.waiting)
        for index, each in [*self.waiting.items()]:
            earlier = f"r{each.after}"
            if each.step <= step and earlier not in busy:
                del self.waiting[index]
                # One that was refused, or is none, has no tokens.
                known = [
                    o for o in self.first.engine.history if o.request_id == earlier
                ]
                before = [t for o in known for t in o.prompt_token_ids + o.token_ids]
                prompt = [*before, *(token % vocab for token in each.prompt)]
                seed = index if each.sampling.seed is None else each.sampling.seed
                yield f"r{index}", prompt, replace(each.sampling, seed=seed)

    def _judge(
        self, parts: Parts, expected: Outcome, actual: Outcome, verdict: Verdict
    ) -> Difference | None:
        """Find the first difference of a step."""
        judge = Judge(self.setup, (self.first.parts, parts), verdict, self.bitwise)
        return next(judge.differences(expected, actual), None)

    def _bisect(self, given: Given, start: Start, expected: Outcome) -> str:
        """Replace one component of the subject after the other by the oracle's."""
        if not self.subject.mixes:
            return ""
        right, wrong = self.first.parts, self.second.parts

        def is_equal(side: Side, parts: Parts) -> bool:
            built = Listened(self.setup, side, self.workload, parts)
            actual = built.run(given, start, self._lead(expected))
            return self._judge(parts, expected, actual, Verdict()) is None

        if self.free_running and is_equal(self.subject, wrong):
            # It is of what the engine kept beside its state, which is lost here.
            return ""
        tries = {
            key: (self.subject, {**wrong, key: right[key]})
            for key in wrong
            if wrong[key] is not right[key]
        }
        if self.oracle.backend != self.subject.backend:
            tries["engine.Engine"] = replace(self.oracle, options={}), {**wrong}
        for key, (side, parts) in tries.items():
            try:
                if is_equal(side, parts):
                    return key
            except ConfigError:
                # No padded engine can have this part; one without padding that is as
                # wrong can.
                plain = replace(side, options={**side.options, "graphs": "off"})
                if is_equal(plain, parts) and not is_equal(plain, wrong):
                    return key
        return ""

    def _measure(self, verdict: Verdict, *outcomes: Outcome) -> None:
        """Measure both sides' errors after each layer against float64.

        Args:
            verdict: Takes the largest.
            outcomes: In float64, of the oracle and of the subject.
        """
        assert outcomes[1].record is not None
        look = Observer(self.setup, outcomes[1].record.plan)
        exact, *sides = (dict(look.calls(each.tape)) for each in outcomes)
        for spot, true in exact.items():
            if spot.tensor != "residual" or not all(spot in side for side in sides):
                continue
            letter = self.setup.model_config.layer_pattern[spot.layer or 0]
            name = f"layer {spot.layer}, {LAYERS[letter]}"
            flat = true.values.flatten()[None]
            for index, side in enumerate(sides):
                error = float(row_errors(side[spot].values.flatten()[None], flat))
                largest = verdict.truth.setdefault(name, [0.0, 0.0])
                largest[index] = max(largest[index], error)


def _add(engine: Any, name: str, prompt: list[int], sampling: SamplingParams) -> str:
    """Put a request into the queue; say what the engine answered."""
    try:
        return engine.add(prompt, sampling, name)
    except RequestError as error:
        return f"{name}: {error}"


def _plan_of(engine: Any) -> Any:
    """Ask for an engine's own plan, or why it has none, and undo it."""
    start = Start.of(engine)
    try:
        return engine.scheduler.plan(None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        start.give(engine)
