"""Runs one workload on two engines, and finds the component to blame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.blocks import align_down
from lockstep.errors import ConfigError, LockstepError, RequestError
from lockstep.plan import RowKind, RowPlan, StepPlan
from lockstep.request import FinishReason, Request, SamplingParams
from lockstep.trace import EngineState, StepRecord

from .exactness import FREE_RUNNING_FACTOR
from .judge import Judge, Outcome, Start
from .recorder import Layout, Recorder, Tape
from .report import LAYERS, Difference, TruthErrors, Verdict, events_of
from .sides import Arrival, Setup, Side, Workload, in_float64

MAX_STEPS = 10_000


@dataclass
class Tick:
    """What comes before a step, and within it.

    Attributes:
        arrivals: Names, prompts and sampling of new requests.
        aborts: Names of requests to abort before it.
        within: Components at whose call a request is aborted; None throws.
    """

    arrivals: list[tuple[str, list[int], SamplingParams]]
    aborts: list[str]
    within: list[tuple[str, str | None]]

    def act(self, engine: Any) -> list[str]:
        """Do what comes before the step; say what the engine answered."""
        answers: list[str] = []
        for name, prompt, sampling in self.arrivals:
            try:
                answers.append(engine.add(prompt, sampling, name))
            except RequestError as error:
                answers.append(f"{name}: {error}")
        for name in self.aborts:
            output = engine.abort(name)
            found = output and (output.token_ids, str(output.finish_reason))
            answers.append(f"{name}: {found}")
        return answers


class Listened:
    """An engine whose components are listened to."""

    def __init__(
        self,
        setup: Setup,
        side: Side,
        parts: Mapping[str, Any] | None = None,
        plans: bool = False,
        probes: bool = False,
    ) -> None:
        """Build it, with every component wrapped.

        Args:
            setup: What it is built from.
            side: Whose engine it is.
            parts: Its components; those of its side unless given.
            plans: Whether it says what it would plan before it follows a plan.
            probes: Whether it is given plans that it should refuse.
        """
        self.parts = side.parts(setup) if parts is None else parts
        self.plans, self.probes = plans, probes
        self.block_size = setup.sizes.block_size
        self.recorder = Recorder(setup.parameters)
        self.engine = side.build(setup, self.recorder.wrap(self.parts))

    def run(
        self,
        tick: Tick,
        start: Start | None = None,
        lead: StepRecord | None = None,
    ) -> Outcome:
        """Take one step.

        Args:
            tick: What comes before it and within it.
            start: Where to begin; where the engine stands unless set.
            lead: The oracle's record, whose plan and tokens are followed.
        """
        engine, record, error = self.engine, None, ""
        if start is not None:
            start.give(engine)
        answers, ready = tick.act(engine), engine.export_state()
        own_plan = self._try_plan(None) if self.plans else None
        refusals = [str(self._try_plan(plan)) for plan in self._misfits(ready)]
        self.recorder.tape = Tape()
        self.recorder.disturbances = [
            (key, partial(_disturb, engine, name)) for key, name in tick.within
        ]
        given = {} if lead is None else {"plan": lead.plan, "tokens": lead.tokens}
        try:
            record = engine.step(**given)
        except Exception as caught:
            if lead is None:
                raise
            error = f"{type(caught).__name__}: {caught}"
        after, tape = Start.of(engine), self.recorder.tape
        plans = own_plan, refusals
        return Outcome(answers, ready, *plans, record, error, tape, after)

    def _misfits(self, state: EngineState) -> Iterator[StepPlan]:
        """Make plans that may not be carried out.

        One takes in all who wait, for whom there may be no slot; others skip as much as
        blocks allow, where logits may be wanted or no state be stored.
        """
        size = self.block_size
        rows = [_first_row(each, 0, 1) for each in state.waiting]
        if self.probes and rows:
            yield StepPlan(rows)
        for each in state.waiting if self.probes else ():
            length = len(each.token_ids)
            if start := align_down(length - 1, size):
                yield StepPlan([_first_row(each, start, length)])

    def _try_plan(self, recorded: StepPlan | None) -> StepPlan | str:
        """Ask for the engine's own plan, or have one carried out, and undo it."""
        start = Start.of(self.engine)
        try:
            return self.engine.scheduler.plan(recorded)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            start.give(self.engine)


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
        self.free_running = free_running
        self.factor = 0.0 if bitwise else FREE_RUNNING_FACTOR if free_running else 1.0
        self.first = Listened(setup, self.oracle, probes=not free_running)
        self.second = self._build(self.subject, None)
        self.truth = Listened(in_float64(setup), Side()) if truth else None
        self.waiting = dict(enumerate(workload.arrivals))
        self.finished: dict[str, list[int]] = {}

    def go(self, verdict: Verdict) -> None:
        """Run to the end, or to the first difference."""
        step = 0
        while self.waiting or self.first.engine.has_work:
            step += 1
            if step > MAX_STEPS:
                raise LockstepError(f"the workload does not end in {MAX_STEPS} steps")
            tick = self._tick(step, verdict)
            start = Start.of(self.first.engine)
            begin = Start.of(self.second.engine) if self.free_running else start
            history = list(self.second.engine.history)
            expected = self.first.run(tick)
            record = expected.record
            assert record is not None
            actual = self.second.run(tick, None if self.free_running else start, record)
            self._note(record, expected.answers)
            verdict.steps += 1
            verdict.events.update(events_of(record))
            if actual.record is not None:
                verdict.reads += actual.record.host_reads
                is_padded = actual.record.padded_shape != actual.record.shape
                verdict.events.update(["padded steps"] if is_padded else [])
            if self.truth:
                exact = self.truth.run(tick, start, record)
                self._add_truth(verdict, exact.tape, expected.tape, actual.tape)
            found = self._judge(expected, actual, verdict)
            if found is not None:
                blame = self._bisect(tick, begin, history, expected)
                name = self.workload.name
                verdict.difference = replace(
                    found, step=step, workload=name, blame=blame
                )
                return

    def _tick(self, step: int, verdict: Verdict) -> Tick:
        """Find out what is to happen in and before a step."""
        due = [
            (index, each)
            for index, each in self.waiting.items()
            if each.step <= step
            and (each.after is None or f"r{each.after}" in self.finished)
        ]
        for index, each in due:
            del self.waiting[index]
            verdict.events.update(["next turns"] if each.after is not None else [])
        here = [each for each in self.workload.disturbances if each.step == step]
        return Tick(
            [self._arrive(*each) for each in due],
            [f"r{each.abort}" for each in here if not each.at],
            [
                (each.at, None if each.abort is None else f"r{each.abort}")
                for each in here
                if each.at
            ],
        )

    def _arrive(
        self, index: int, arrival: Arrival
    ) -> tuple[str, list[int], SamplingParams]:
        """Make a request out of an arrival, for this model's vocabulary."""
        vocab, sampling = self.setup.model_config.vocab_size, arrival.sampling
        before = [] if arrival.after is None else self.finished[f"r{arrival.after}"]
        prompt = [*before, *(token % vocab for token in arrival.prompt)]
        ends = tuple(token for token in sampling.stop_token_ids if token < vocab)
        seed = index if sampling.seed is None else sampling.seed
        return f"r{index}", prompt, replace(sampling, stop_token_ids=ends, seed=seed)

    def _note(self, record: StepRecord, answers: list[str]) -> None:
        """Remember what has ended, so that next turns can arrive."""
        for answer in answers:
            name, colon, _ = answer.partition(":")
            if colon:
                self.finished.setdefault(name, [])
        for output in record.finished:
            tokens = output.prompt_token_ids + output.token_ids
            self.finished[output.request_id] = tokens

    def _judge(
        self, expected: Outcome, actual: Outcome, verdict: Verdict
    ) -> Difference | None:
        """Find the first difference of a step."""
        judge = Judge(self.setup, self.second.parts, verdict, self.factor)
        return next(judge.differences(expected, actual), None)

    def _build(self, side: Side, parts: Mapping[str, Any] | None) -> Listened:
        """Build an engine that is to be judged."""
        is_led = not self.free_running
        return Listened(self.setup, side, parts, plans=is_led, probes=is_led)

    def _bisect(
        self, tick: Tick, start: Start, history: list[Any], expected: Outcome
    ) -> str:
        """Replace one component of the subject after the other by the oracle's."""
        if not self.subject.mixes:
            return ""
        right, wrong = self.oracle.parts(self.setup), dict(self.second.parts)
        tries = {
            key: (self.subject, {**wrong, key: right[key]})
            for key in wrong
            if wrong[key] is not right[key]
        }
        if self.oracle.backend != self.subject.backend:
            tries["engine.Engine"] = replace(self.oracle, options={}), wrong

        def is_equal(side: Side, parts: Mapping[str, Any]) -> bool:
            built = self._build(side, parts)
            built.engine.history.extend(history)
            actual = built.run(tick, start, expected.record)
            return self._judge(expected, actual, Verdict()) is None

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

    def _add_truth(
        self, verdict: Verdict, exact: Tape, expected: Tape, actual: Tape
    ) -> None:
        """Add up both sides' errors against float64, layer by layer."""
        tapes = exact, expected, actual
        for place in exact.calls:
            known = all(place in tape.calls for tape in tapes)
            if place.key != "norm.add_rms_norm" or place.layer is None or not known:
                continue
            letter = self.setup.model_config.layer_pattern[place.layer]
            layer = f"{place.layer} {LAYERS[letter]}"
            name = self.workload.name
            entry = verdict.truth.setdefault((name, layer), TruthErrors())
            outputs = [
                Layout(tape.batch).take(place, tape.calls[place].results["residual"])
                for tape in tapes
                if tape.batch is not None
            ]
            entry.add(*outputs)


def _first_row(request: Request, start: int, end: int) -> RowPlan:
    """Make the row in which a request would be admitted."""
    samples = end == len(request.token_ids)
    kind = RowKind.PREFILL
    return RowPlan(request.request_id, kind, start, end, samples, 0, 0, [])


def _disturb(engine: Any, name: str | None) -> None:
    """Abort a request, or fail."""
    if name is None:
        raise RuntimeError("thrown by the workload")
    # As if its text had come to a stop string, which only the caller can see.
    engine.abort(name, FinishReason.STOP)
