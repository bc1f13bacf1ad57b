"""Compares what two engines made of one step, in the order in which they made it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.memory import Caches
from lockstep.plan import StepPlan
from lockstep.trace import EngineState, StepRecord

from .exactness import BUDGETS, UNIT_ROUNDOFF, row_errors
from .recorder import CHOICES, Call, Layout, Place, Tape
from .report import Difference, Verdict
from .sides import Setup

#: What differs from run to run, and what is compared in another way.
_IGNORED = ("timings", "hashes", "logprobs", "prompt_logprobs")
_SCHEDULER, _ENGINE = "scheduler.Scheduler", "engine.Engine"


class Start(NamedTuple):
    """Where a step begins: what an engine knows, and who has to run alone."""

    state: EngineState
    solo: list[tuple[str, int]]

    @classmethod
    def of(cls, engine: Any) -> Start:
        """Copy it from an engine."""
        solo = [(each.request_id, end) for each, end in engine.scheduler.solo]
        return cls(engine.export_state(), solo)

    def give(self, engine: Any) -> None:
        """Put an engine there."""
        engine.import_state(self.state)
        find = engine.scheduler.find
        engine.scheduler.solo = [(find(name), end) for name, end in self.solo]


@dataclass
class Outcome:
    """All that a step of one engine left to be compared.

    Attributes:
        answers: What it said to requests and aborts before the step.
        ready: What it knew then.
        own_plan: What it would have planned, or why it could not; None if not asked.
        refusals: What it said to plans that should not fit.
        record: What it says that it did; None if it raised ``error``.
        error: Type and message.
        tape: What was heard.
        after: What it knew then.
    """

    answers: list[str]
    ready: EngineState
    own_plan: StepPlan | str | None
    refusals: list[str]
    record: StepRecord | None
    error: str
    tape: Tape
    after: Start


class Judge:
    """Finds differences of one step."""

    def __init__(
        self,
        setup: Setup,
        parts: Mapping[str, Any],
        verdict: Verdict,
        factor: float,
    ) -> None:
        """Know how exact is exact here.

        Args:
            setup: What both engines were built from.
            parts: The subject's components.
            verdict: Takes errors and ties.
            factor: Of the budgets; 0 compares floats bit by bit.
        """
        self.sizes, self.pattern = setup.sizes, setup.model_config.layer_pattern
        self.parts, self.verdict = parts, verdict
        config, own = setup.engine_config, setup.parameters.embedding.dtype
        named = [n for n in (config.kv_dtype, config.ssm_state_dtype) if n != "auto"]
        dtypes = own, *(getattr(torch, name) for name in named)
        self.unit = max(UNIT_ROUNDOFF[dtype] for dtype in dtypes)
        self.budgets = {kind: factor * budget for kind, budget in BUDGETS.items()}
        #: Requests whose numbers may differ for the rest of the step, since which
        #: expert a token visits was a tie.
        self.excused: set[str] = set()

    def differences(self, expected: Outcome, actual: Outcome) -> Iterator[Difference]:
        """Find differences, in the order in which a step makes them."""
        record = expected.record
        assert record is not None
        self.plan = record.plan
        if actual.answers != expected.answers:
            yield _unequal(_ENGINE, "answers", actual.answers, expected.answers)
        yield from self._states(actual.ready, expected.ready)
        if actual.own_plan is not None:
            yield from self._plans(actual.own_plan, record.plan, "own plan")
        for mine, theirs in zip(actual.refusals, expected.refusals, strict=False):
            if mine != theirs:
                yield _unequal(_SCHEDULER, "answer to a plan", mine, theirs)
        if actual.record is not None:
            yield from self._plans(actual.record.plan, record.plan, "plan")
        yield from self._batches(actual.tape, expected.tape)
        yield from self._calls(actual.tape, expected.tape)
        if actual.tape.failure is not None and expected.tape.failure is None:
            place, why = actual.tape.failure
            yield Difference(place.key, "exception", why, place.layer)
        if actual.record is None:
            yield Difference(_ENGINE, "exception", actual.error)
            return
        yield from self._records(actual.record, record)
        yield from self._states(actual.after.state, expected.after.state)
        if actual.after.solo != expected.after.solo:
            yield _unequal(_SCHEDULER, "solo", actual.after.solo, expected.after.solo)
        yield from self._caches(actual.after.state.caches, expected.after.state.caches)

    # Integers.

    def _states(
        self, actual: EngineState, expected: EngineState
    ) -> Iterator[Difference]:
        """Compare the pools' bookkeeping, then the queues."""
        yield from _fields("kv_blocks.BlockPool", actual.blocks, expected.blocks)
        yield from _fields("state_slots.StateSlots", actual.slots, expected.slots)
        queues = "running", "waiting"
        yield from _fields(
            _SCHEDULER, actual, expected, skip=("blocks", "slots", "caches", *queues)
        )
        for name in queues:
            mine, theirs = getattr(actual, name), getattr(expected, name)
            ids = [[each.request_id for each in side] for side in (mine, theirs)]
            if ids[0] != ids[1]:
                yield _unequal(_SCHEDULER, name, *ids)
                continue
            for pair in zip(mine, theirs, strict=True):
                yield from self._requests(*pair)

    def _requests(self, actual: Any, expected: Any) -> Iterator[Difference]:
        """Compare a request; hashes may be made late."""
        found = list(_fields(_SCHEDULER, actual, expected, skip=_IGNORED))
        known = min(len(actual.hashes), len(expected.hashes))
        pairs = {"hashes": (actual.hashes[:known], expected.hashes[:known])}
        for name in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(actual, name), getattr(expected, name)
            if expected.request_id not in self.excused:
                pairs[name] = (self._agree(mine, theirs), True)
        for name, (mine, theirs) in pairs.items():
            if mine != theirs:
                found.append(_unequal(_ENGINE, name, mine, theirs))
        yield from (replace(each, request=expected.request_id) for each in found)

    def _plans(
        self, actual: StepPlan | str, expected: StepPlan, name: str
    ) -> Iterator[Difference]:
        """Compare plans, row by row and then whole."""
        if isinstance(actual, str):
            yield Difference(_SCHEDULER, name, actual)
            return
        for mine, theirs in zip(actual.rows, expected.rows, strict=False):
            for found in _fields(_SCHEDULER, mine, theirs, f"{name}: "):
                yield replace(found, request=theirs.request_id)
        yield from _fields(_SCHEDULER, actual, expected, f"{name}: ")

    def _batches(self, actual: Tape, expected: Tape) -> Iterator[Difference]:
        """Compare the real entries of the batches."""
        if actual.batch is None or expected.batch is None:
            return
        key, limits = "metadata.MetadataBuilder", (self.sizes.dummy_block,)
        limits = *limits, self.sizes.block_size
        try:
            mine = Layout(actual.batch).arrays(*limits)
        except (IndexError, RuntimeError) as error:
            yield Difference(key, "layout", str(error))
            return
        for name, theirs in Layout(expected.batch).arrays(*limits).items():
            if mine[name] != theirs:
                yield _unequal(key, name, mine[name], theirs)

    # Floats.

    def _calls(self, actual: Tape, expected: Tape) -> Iterator[Difference]:
        """Compare results and writes of every component, in the oracle's order."""
        if actual.batch is None or expected.batch is None:
            return
        subject, oracle = Layout(actual.batch), Layout(expected.batch)
        rows = [*self.plan.decode_rows, *self.plan.prefill_rows]
        tokens = [(r.request_id, p) for r in rows for p in range(r.start, r.end)]
        for place, theirs in expected.calls.items():
            mine = actual.calls.get(place)
            if mine is None:
                continue
            owners = oracle.owners(place, tokens)
            for name in [name for name in theirs.results if name in mine.results]:
                pair = (
                    subject.take(place, mine.results[name]),
                    oracle.take(place, theirs.results[name]),
                )
                for found in self._rows(place.key, name, *pair, owners):
                    if not self._is_tie(found, place, subject, mine, theirs):
                        yield replace(found, layer=place.layer)
            for name in theirs.pools:
                pair = mine.pools[name], theirs.pools[name]
                yield from self._pool(place.key, name, *pair, place.layer)

    def _rows(
        self,
        key: str,
        name: str,
        actual: Tensor,
        expected: Tensor,
        owners: list[tuple[str, int]],
    ) -> Iterator[Difference]:
        """Compare results token by token."""
        if actual.shape != expected.shape:
            yield _unequal(key, f"shape of {name}", actual.shape, expected.shape)
            return
        kind = "log-probabilities" if name == "logprobs" else "results"
        is_exact = not expected.is_floating_point()
        errors = row_errors(actual, expected) / self.unit
        for index in errors.nonzero()[:, 0].tolist():
            (request, position), error = owners[index], float(errors[index])
            if request in self.excused:
                continue
            if not is_exact:
                self.verdict.note(kind, error)
            if is_exact or error > self.budgets[kind]:
                pair = actual[index].tolist(), expected[index].tolist()
                found = _unequal(key, name, *pair)
                if not is_exact:
                    found = replace(found, details=self._too_much(error, kind))
                yield replace(found, request=request, position=position)

    def _too_much(self, error: float, kind: str) -> str:
        """Write an error and its bound."""
        most = self.budgets[kind] * self.unit
        return f"relative error {error * self.unit:.1e}, at most {most:.1e}"

    def _is_tie(
        self, found: Difference, place: Place, layout: Layout, mine: Call, theirs: Call
    ) -> bool:
        """Tell whether rounding alone decided on a choice.

        It did if the subject's component, given what the oracle's was given, chooses
        as that did, and if it does not once its own inputs stand in their place; these
        were equal within their class. What follows from a token's experts differs for
        the rest of the step.
        """
        if found.request in self.excused:
            return True
        is_choice = found.tensor in ("expert_ids", "token_ids")
        is_exact = not self.budgets["results"]
        if is_exact or not is_choice or place.key not in CHOICES:
            return False
        (given, *rest), choose = theirs.arguments, self.parts[place.key]
        own = layout.take(place, mine.arguments[0])
        choices = [choose(each, *rest) for each in (given, own)]
        again = [each[0] if isinstance(each, tuple) else each for each in choices]
        right, wrong = theirs.results[found.tensor], mine.results[found.tensor]
        if not torch.equal(again[0], right):
            return False
        if not torch.equal(again[1], layout.take(place, wrong)):
            return False
        if place.key == "moe.route":
            self.excused.add(found.request)
        self.verdict.ties.append(str(replace(found, layer=place.layer)))
        return True

    def _pool(
        self,
        key: str,
        name: str,
        actual: Tensor,
        expected: Tensor,
        layer: int | None,
    ) -> Iterator[Difference]:
        """Compare a pool, of one layer or of all, but for what is never read."""
        if name in ("conv", "ssm"):
            for index, number in enumerate(_numbers(self.pattern, "M")):
                pair = actual[index], expected[index]
                yield from self._pool(key, f"{name}_states", *pair, number)
            return
        mine, theirs, locate = actual[:-1], expected[:-1], self._slot_owner
        kind = "conv windows" if "conv" in name else "SSM states"
        if "blocks" in name:
            mine, theirs = mine.flatten(0, 1), theirs.flatten(0, 1)
            kind, locate = "K/V", self._block_owner
        errors = row_errors(mine, theirs) / self.unit
        for index in errors.nonzero()[:, 0].tolist():
            (request, position, where), error = locate(index), float(errors[index])
            if request in self.excused:
                continue
            self.verdict.note(kind, error)
            if error > self.budgets[kind]:
                details = f"{self._too_much(error, kind)}, in {where}"
                yield Difference(key, name, details, layer, request, position)

    def _caches(self, actual: Caches, expected: Caches) -> Iterator[Difference]:
        """Compare both pools as the step leaves them."""
        for name in ("conv", "ssm"):
            pair = getattr(actual, name), getattr(expected, name)
            yield from self._pool(_ENGINE, name, *pair, None)
        for part, name in enumerate(("key_blocks", "value_blocks")):
            for index, number in enumerate(_numbers(self.pattern, "*")):
                pair = actual.kv[part, index], expected.kv[part, index]
                yield from self._pool(_ENGINE, name, *pair, number)

    def _block_owner(self, index: int) -> tuple[str, int | None, str]:
        """Say whose a place of the K/V pool is in this step."""
        block, offset = divmod(index, self.sizes.block_size)
        where = f"block {block}, offset {offset}"
        for row in self.plan.rows:
            if block in row.block_table:
                first = row.block_table.index(block) * self.sizes.block_size
                return row.request_id, first + offset, where
        return "", None, f"{where}, which no row of the step has"

    def _slot_owner(self, slot: int) -> tuple[str, int | None, str]:
        """Say whose a slot is in this step."""
        for row in self.plan.rows:
            if slot == row.slot_id:
                return row.request_id, row.end, f"live slot {slot}"
            for snapshot in row.snapshots:
                if slot == snapshot.slot_id:
                    return row.request_id, snapshot.position, f"snapshot slot {slot}"
        return "", None, f"slot {slot}, which no row of the step writes"

    # Records.

    def _records(
        self, actual: StepRecord, expected: StepRecord
    ) -> Iterator[Difference]:
        """Compare what the steps say that they did."""
        ends = "interrupted", "failed", "aborted"
        for name in ends:
            mine, theirs = getattr(actual, name), getattr(expected, name)
            if mine != theirs:
                yield _unequal(_ENGINE, name, mine, theirs)
        own = "plan", "padded_shape", "mode", "host_reads", "eager_reason", *ends
        floats = "logprobs", "reported", "prompt_reported", "finished"
        yield from _fields(_ENGINE, actual, expected, skip=(*own, *floats))
        rows = {row.request_id: row for row in expected.rows}
        for name, values in expected.logprobs.items():
            if name in actual.logprobs:
                owners = [(name, p) for p in range(rows[name].start, rows[name].end)]
                pair = actual.logprobs[name], values
                key = "sampler.log_probabilities"
                yield from self._rows(key, "logprobs", *pair, owners)
        for name in floats:
            mine, theirs = getattr(actual, name), getattr(expected, name)
            if name == "finished":
                mine, theirs = (
                    {each.request_id: _plain(each) for each in side}
                    for side in (mine, theirs)
                )
            if mine.keys() != theirs.keys():
                yield _unequal(_ENGINE, name, [*mine], [*theirs])
                continue
            if name == "logprobs":
                continue
            for who in [who for who in theirs if who not in self.excused]:
                is_equal = (
                    mine[who] == theirs[who]
                    if name == "finished"
                    else self._agree(mine[who], theirs[who])
                )
                if not is_equal:
                    found = _unequal(_ENGINE, name, mine[who], theirs[who])
                    yield replace(found, request=who)

    def _agree(self, actual: Any, expected: Any) -> bool:
        """Compare what was reported: a dictionary by token, or a list of such."""
        if not actual or not expected:
            return actual == expected
        if isinstance(expected, list):
            pairs = zip(actual, expected, strict=False)
            return len(actual) == len(expected) and all(
                self._agree(*pair) for pair in pairs
            )
        values = [*actual.values(), *expected.values()]
        bound = self.budgets["log-probabilities"] * self.unit
        bound *= max(1.0, *map(abs, values))

        def knows(side: dict[int, float], token: int, value: float) -> bool:
            # An id that a side lacks may be as likely as one that it has.
            near = [side[token]] if token in side else side.values()
            return any(abs(value - each) <= bound for each in near)

        is_same = [*actual][0] == [*expected][0]
        return (
            is_same
            and all(knows(expected, *entry) for entry in actual.items())
            and all(knows(actual, *entry) for entry in expected.items())
        )


def _fields(
    key: str,
    actual: Any,
    expected: Any,
    prefix: str = "",
    skip: Collection[str] = (),
) -> Iterator[Difference]:
    """Compare two objects field by field."""
    for entry in fields(expected):
        mine, theirs = getattr(actual, entry.name), getattr(expected, entry.name)
        if entry.name not in skip and mine != theirs:
            yield _unequal(key, prefix + entry.name, mine, theirs)


def _unequal(key: str, name: str, actual: Any, expected: Any) -> Difference:
    """Report two values."""
    return Difference(key, name, f"{_brief(actual)} instead of {_brief(expected)}")


def _brief(value: Any, most: int = 100) -> str:
    """Write a value in one short line."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _plain(output: Any) -> Any:
    """Drop from an output what is compared in another way."""
    return replace(output, timings=None, logprobs=None, prompt_logprobs=None)


def _numbers(pattern: str, letter: str) -> list[int]:
    """List the layers of a kind."""
    return [index for index, each in enumerate(pattern) if each == letter]
