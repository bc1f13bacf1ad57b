"""Names everything that a step left behind, in the order in which it came to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.memory import Caches
from lockstep.plan import StepPlan
from lockstep.trace import EngineState, StepRecord

from .recorder import Layout, Tape
from .sides import Setup

SCHEDULER, ENGINE = "scheduler.Scheduler", "engine.Engine"
#: Whose the pools' bookkeeping is.
_POOLS = {"blocks": "kv_blocks.BlockPool", "slots": "state_slots.StateSlots"}
#: Fields that say more than what follows from them, and so come first.
_FIRST = ("blocks", "slots", "interrupted", "failed", "aborted")
#: Fields that differ between runs or backends, and those that may be made late.
_SKIPPED = ("timings", "padded_shape", "mode", "host_reads", "eager_reason", "hashes")


class Spot(NamedTuple):
    """Where something stands; what comes twice is told apart by its turn."""

    operation: str
    tensor: str = ""
    layer: int | None = None
    request: str = ""
    turn: int = 0


class Owner(NamedTuple):
    """Whose a row of a tensor is, if anybody's, and of which position."""

    request: str = ""
    position: int | None = None


class Rows(NamedTuple):
    """A tensor that is compared row by row.

    Attributes:
        values: The tensor.
        owners: Whose rows are.
        kind: Class of its floats; names an entry of `compare.BUDGETS`.
        arguments: Of the call that chose these integers.
    """

    values: Tensor
    owners: Mapping[int, Owner]
    kind: str
    arguments: tuple[Any, ...] = ()


class Start(NamedTuple):
    """Where a step begins: what an engine knows, who must run alone, who has ended."""

    state: EngineState
    solo: list[tuple[str, int]]
    history: list[Any]

    @classmethod
    def of(cls, engine: Any) -> Start:
        """Copy it from an engine."""
        solo = [(each.request_id, end) for each, end in engine.scheduler.solo]
        return cls(engine.export_state(), solo, [*engine.history])

    def give(self, engine: Any) -> None:
        """Put an engine there."""
        engine.import_state(self.state)
        find = engine.scheduler.find
        engine.scheduler.solo = [(find(name), end) for name, end in self.solo]
        engine.history.clear()
        engine.history.extend(self.history)


@dataclass
class Outcome:
    """All that a step of one engine left to be compared.

    Attributes:
        answers: What it said to requests, and to the workload, before the step.
        ready: What it knew then.
        own_plan: What it would have planned, or why it could not.
        record: What it says that it did; None if it raised ``error``.
        error: Type and message.
        tape: What was heard.
        after: What it knew then.
    """

    answers: list[Any]
    ready: EngineState
    own_plan: StepPlan | str
    record: StepRecord | None
    error: str
    tape: Tape
    after: Start


Seen = Iterator[tuple[Spot, Any]]


class Observer:
    """Lists what steps left; values are plain or `Rows`."""

    def __init__(self, setup: Setup, plan: StepPlan) -> None:
        """Know whose everything is, by the plan that is carried out."""
        self.sizes, self.pattern = setup.sizes, setup.model_config.layer_pattern
        self.starts = {row.request_id: row.start for row in plan.rows}
        self.tokens = list[Owner]()
        self.slots, self.places = dict[int, Owner](), dict[int, Owner]()
        for row in [*plan.decode_rows, *plan.prefill_rows]:
            owners = [Owner(row.request_id, position) for position in range(row.end)]
            self.tokens += owners[row.start :]
            self.slots[row.slot_id] = Owner(row.request_id, row.end)
            for each in row.snapshots:
                self.slots[each.slot_id] = Owner(row.request_id, each.position)
            for position, owner in enumerate(owners):
                block, offset = divmod(position, self.sizes.block_size)
                place = row.block_table[block] * self.sizes.block_size + offset
                self.places[place] = owner

    def before(self, outcome: Outcome) -> Seen:
        """List what there is before the forward pass."""
        for turn, answer in enumerate(outcome.answers):
            yield from self._walk(Spot(ENGINE, "answers", turn=turn), answer)
        yield from self._walk(Spot(SCHEDULER), outcome.ready)
        yield from self._walk(Spot(SCHEDULER, "own plan"), outcome.own_plan)
        if outcome.record is not None:
            yield from self._walk(Spot(SCHEDULER, "plan"), outcome.record.plan)
        if outcome.tape.batch is not None:
            sizes = self.sizes.dummy_block, self.sizes.block_size
            for name, values in Layout(outcome.tape.batch).arrays(*sizes).items():
                yield Spot("metadata.MetadataBuilder", name), values

    def padding(self, tape: Tape) -> Seen:
        """List a step's arrays, padding and all, and which tokens no expert sees."""
        if tape.batch is None:
            return
        spot = Spot("metadata.MetadataBuilder")
        arrays = {
            each.name: getattr(tape.batch, each.name) for each in fields(tape.batch)
        }
        arrays |= arrays.pop("draws")._asdict()
        for name, value in arrays.items():
            plain = value.tolist() if isinstance(value, Tensor) else value
            yield spot._replace(tensor=f"padded {name}"), plain
        for place, call in tape.calls.items():
            if place.key == "moe.route":
                unrouted = (call.results["expert_ids"] < 0).all(1)
                spot = Spot(place.key, "unrouted tokens", place.layer, turn=place.turn)
                yield spot, unrouted.tolist()

    def calls(self, tape: Tape) -> Seen:
        """List what components returned and wrote."""
        if tape.batch is None:
            return
        layout = Layout(tape.batch)
        for place, call in tape.calls.items():
            own, given = layout.owners(place, self.tokens), call.arguments
            if given:
                given = layout.take(place, given[0]), *given[1:]
            spot = Spot(place.key, "", place.layer, turn=place.turn)
            for name, result in call.results.items():
                values = layout.take(place, result)
                rows = Rows(values, own, "results", given)
                yield spot._replace(tensor=name), rows
            for name, pool in call.pools.items():
                if isinstance(pool, Tensor):
                    yield self._pool(spot._replace(tensor=name), pool)
                else:
                    yield from self._caches(spot, pool)

    def after(self, outcome: Outcome) -> Seen:
        """List the step's record, and what the engine knows then."""
        yield from self._walk(Spot(ENGINE), outcome.record)
        yield from self._walk(Spot(SCHEDULER, turn=1), outcome.after.state)
        yield Spot(SCHEDULER, "solo"), outcome.after.solo

    def _walk(self, spot: Spot, value: Any) -> Seen:
        """List what an object holds, by field and by request, down to plain values."""
        if isinstance(value, Tensor):
            start, kind = self.starts[spot.request], "log-probabilities"
            own = {i: Owner(spot.request, start + i) for i in range(len(value))}
            yield spot, Rows(value, own, kind)
        elif isinstance(value, Caches):
            yield from self._caches(spot, value)
        elif is_dataclass(value):
            yield spot, type(value).__name__
            names = [each.name for each in fields(value) if each.name not in _SKIPPED]
            for name in sorted(names, key=lambda name: name not in _FIRST):
                owner = _POOLS.get(name, spot.operation)
                below = ".".join(filter(None, (spot.tensor, name)))
                part = spot._replace(operation=owner, tensor=below)
                yield from self._walk(part, getattr(value, name))
        elif named := _by_request(value):
            yield spot, [*named]
            for name, each in named.items():
                yield from self._walk(spot._replace(request=name), each)
        else:
            yield spot, value

    def _caches(self, spot: Spot, caches: Caches) -> Seen:
        """List the pools of all layers."""
        pools = {
            "conv_states": ("M", caches.conv),
            "ssm_states": ("M", caches.ssm),
            "key_blocks": ("*", caches.kv[0]),
            "value_blocks": ("*", caches.kv[1]),
        }
        for name, (letter, pool) in pools.items():
            layers = [i for i, each in enumerate(self.pattern) if each == letter]
            for layer, values in zip(layers, pool, strict=True):
                yield self._pool(spot._replace(tensor=name, layer=layer), values)

    def _pool(self, spot: Spot, pool: Tensor) -> tuple[Spot, Rows]:
        """Take a pool of one layer but for the dummies, which come last."""
        if spot.tensor.endswith("blocks"):
            return spot, Rows(pool[:-1].flatten(0, 1), self.places, "K/V")
        return spot, Rows(pool[:-1], self.slots, spot.tensor.replace("_", " "))


def _by_request(value: Any) -> dict[str, Any]:
    """Name the parts of a list or dictionary that belong to requests, if all do."""
    if isinstance(value, list):
        value = {getattr(e, "request_id", i): e for i, e in enumerate(value)}
    is_named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return dict(value) if is_named else {}
