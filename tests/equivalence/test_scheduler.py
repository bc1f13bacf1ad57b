"""The scheduler against its twin, with the cache and pools of either side below it."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lockstep.errors import PlanError
from lockstep.request import Request
from lockstep.trace import StepRecord
from tests.books import BLOCK, Action, Books, Setting, act, make_request, random_trace

MODULES = ("kv_blocks", "state_slots", "prefix_cache", "scheduler")

#: The optimized side whole, and single parts of it in the reference.
MIXES: dict[str, dict[str, str]] = {
    "all": dict.fromkeys(MODULES, "optimized"),
    **{module: {module: "optimized"} for module in MODULES},
}
#: What some of the traces must meet.
EVENTS = (
    *("preempted", "deferred", "evicted_blocks", "evicted_states"),
    *("failed", "interrupted", "plan", "forward", "sample"),
    *("max_requests", "max_tokens_per_step", "too few blocks for request"),
    "a prompt was cut; its rest comes first",
    "a request was preempted: there are too few blocks",
    "cannot be preempted: it is not running",
    "cannot be preempted: it has a row",
    "has no decode row to come",
    "has no prefill row to come",
    "no unfinished request is named",
    "the plan has two rows of one request",
    "the plan computes tokens; a step may",
    "the plan computes tokens to of which has",
    "the plan computes tokens to of which stands at",
    "the plan skips of tokens; are cached, with states at and logits are wanted after "
    "token",
)


def without_times(request: Request) -> dict[str, Any]:
    """Return all that is known of a request but when it happened."""
    return {**vars(request), "timings": None}


def essence(record: StepRecord) -> StepRecord:
    """Return a copy of a record without times, which nothing that follows changes."""
    finished = [replace(each, timings=None) for each in record.finished]  # type: ignore[arg-type]
    return pickle.loads(pickle.dumps(replace(record, finished=finished)))


def seen(books: Books) -> dict[str, Any]:
    """Return all that can be seen between two steps."""
    scheduler = books.scheduler
    return {
        "step": scheduler.step,
        "admissions": scheduler.admissions,
        "waiting": [without_times(request) for request in scheduler.waiting],
        "running": [without_times(request) for request in scheduler.running],
        "solo": [(request.request_id, end) for request, end in scheduler.solo],
        "blocks": books.blocks.export_state(),
        "slots": books.slots.export_state(),
    }


class Twins:
    """Two sides to which the same happens."""

    def __init__(self, setting: Setting, replaced: dict[str, str]) -> None:
        """Begin with both empty."""
        self.sides = Books("reference", setting), Books("reference", setting, replaced)
        self.records: list[tuple[StepRecord, StepRecord]] = []

    def act(self, action: Action) -> None:
        """Do something to both and compare."""
        first, second = self.sides
        if action[0] == "hand over":
            state = first.export_state()
            first.import_state(second.export_state())
            second.import_state(state)
        for mine, theirs in zip(act(second, action), act(first, action), strict=True):
            expected = essence(theirs)
            assert essence(mine) == expected
            self.records.append((mine, expected))
        assert seen(second) == seen(first)
        for books in self.sides:
            books.check()

    def run_dry(self) -> None:
        """Step until nothing is left to do, and see that no plan changed afterwards."""
        for _ in range(400):
            if not self.sides[0].scheduler.has_work:
                break
            self.act(("step", 1))
        assert not any(books.scheduler.has_work for books in self.sides)
        for mine, expected in self.records:
            assert mine.plan == expected.plan


def play(seed: int, mix: str) -> Twins:
    """Let one random trace happen to the reference and to a mix."""
    setting, actions = random_trace(seed)
    twins = Twins(setting, MIXES[mix])
    for action in actions:
        twins.act(action)
    twins.run_dry()
    return twins


def events_of(twins: Twins) -> Counter[str]:
    """Count what the traces are there for."""
    counts: Counter[str] = Counter()
    for record, _ in twins.records:
        plan = record.plan
        for name in ("preempted", "deferred", "evicted_blocks", "evicted_states"):
            counts[name] += bool(getattr(plan, name))
        counts[plan.blocked.split(" (")[0].split(" '")[0]] += 1
        counts["failed"] += bool(record.failed)
        counts["interrupted"] += bool(record.interrupted)
        if words := record.eager_reason.split():
            # Numbers and names are the request's own.
            known = [word for word in words if not set("'[]0123456789") & set(word)]
            counts[" ".join(known)] += 1
    return counts


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("part", range(5))
def test_any_actions(part: int, mix: str) -> None:
    """Same plans, evictions, state and errors, whatever happens, faults included."""
    count = 60 if mix == "all" else 16
    for seed in range(count * part, count * (part + 1)):
        play(seed, mix)


def test_the_traces_meet_what_matters() -> None:
    """Otherwise the test above would show little."""
    counts: Counter[str] = Counter()
    for seed in range(150):
        counts.update(events_of(play(seed, "all")))
    print("\n".join(f"{count:6d}  {name}" for name, count in counts.items()))
    assert [name for name in EVENTS if not counts[name]] == []


class Counting:
    """Passes calls on to a cache and counts them."""

    def __init__(self, cache: Any) -> None:
        """Stand before a cache."""
        self.cache = cache
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        """Count, and pass on."""
        self.counts[name] += 1
        return getattr(self.cache, name)


def crowd(num_waiting: int, **setting: Any) -> Books:
    """Return the optimized side with many requests that have nothing in common."""
    books = Books("optimized", Setting(num_blocks=400, **setting))
    for index in range(num_waiting):
        books.add([index, index + 1] * BLOCK, 40)
    return books


def test_a_queue_that_cannot_move_is_not_looked_at() -> None:
    """No prompt of it is hashed or matched, however many there are."""
    books = crowd(300, max_requests=4, max_tokens_per_step=100)
    books.step()
    books.scheduler.cache = cache = Counting(books.cache)
    record = books.step()
    assert record.plan.blocked.startswith("max_requests")
    assert (cache.counts["first_missing"], cache.counts["admit"]) == (0, 0)
    assert sum(cache.counts.values()) <= 4 * len(record.rows)
    assert not any(request.hashes for request in books.scheduler.waiting)


def test_a_step_looks_at_what_it_admits_and_one_more() -> None:
    """The rest of the queue is left alone."""
    books = crowd(300, max_requests=40, max_tokens_per_step=7 * 2 * BLOCK)
    books.scheduler.cache = cache = Counting(books.cache)
    record = books.step()
    assert len(record.rows) == 7
    assert (cache.counts["first_missing"], cache.counts["admit"]) == (7, 7)


def test_rows_share_a_table_until_it_changes() -> None:
    """A copy for each block that is completed, not for each token."""
    books = crowd(1, max_requests=1)
    tables = [books.step().rows[0].block_table for _ in range(20)]
    assert len({id(table) for table in tables}) <= 2 + 2 * 20 // BLOCK
    assert [len(table) for table in tables] == [
        -(-(2 * BLOCK + generated) // BLOCK) for generated in range(20)
    ]
    assert tables[0] is not books.requests[0].block_table


def test_replaced_lists_are_noticed() -> None:
    """Each alone: requests of the same name, but not the same ones, other blocks."""
    books = crowd(3, max_requests=2, max_tokens_per_step=40)
    # The second token needs a block, the third none.
    before = [books.step().rows for _ in range(2)][-1]
    scheduler = books.scheduler
    scheduler.running = copy.deepcopy(scheduler.running)
    for request in scheduler.running:
        request.block_table.reverse()
    plan = scheduler.plan()
    tables = [request.block_table for request in scheduler.running]
    assert list(map(len, tables)) == [len(row.block_table) for row in before]
    assert [row.block_table for row in plan.rows] == tables
    assert scheduler.find("r0") is scheduler.running[0]
    assert scheduler._by_name() is scheduler._by_name()
    scheduler.waiting = copy.deepcopy(scheduler.waiting)
    assert scheduler.find("r2") is scheduler.waiting[0]


def test_a_row_sees_the_twin_that_replaced_its_block() -> None:
    """What a prompt computes though another has just generated it is given up."""
    alone = Books("reference")
    alone.add([1] * 5, 9)
    while alone.scheduler.has_work:
        alone.step()
    generated = alone.ended[0][: 2 * BLOCK]
    setting = Setting(num_blocks=20, max_tokens_per_step=9)
    twins = Twins(setting, MIXES["all"])
    for books in twins.sides:
        books.add([1] * 5, 9)
    twins.act(("step", 3))
    for books in twins.sides:
        books.add([*generated, *[2] * 20], 1)
    twins.run_dry()
    rows = [row for record, _ in twins.records for row in record.rows]
    tables = [row.block_table for row in rows if row.request_id == "r1"]
    assert len(tables[0]) == len(tables[1])
    assert tables[0] != tables[1]


def test_a_request_that_comes_back_has_its_new_blocks() -> None:
    """Those that it had are others' now, though they are as many."""
    books = Books("optimized", Setting(enabled=False))
    books.add([1] * 2 * BLOCK, 9)
    before = books.step().rows[0].block_table
    request = books.requests[0]
    books.scheduler.preempt(request)
    books.blocks.allocate(1)
    row = books.step().rows[0]
    assert len(before) < len(row.block_table)
    books.scheduler.preempt(request)
    books.blocks.allocate(1)
    again = books.step().rows[0]
    assert len(again.block_table) == len(row.block_table)
    assert again.block_table == request.block_table != row.block_table


def test_requests_with_one_number_are_told_apart() -> None:
    """Each leaves the queue itself."""
    for gone in range(3):
        scheduler = Books("optimized").scheduler
        requests = [make_request(0, [1]) for _ in range(3)]
        for index, request in enumerate(requests):
            request.request_id = f"r{index}"
            scheduler.add(request)
        scheduler.remove(requests[gone])
        left = [request for request in requests if request is not requests[gone]]
        assert [id(each) for each in scheduler.waiting] == [id(each) for each in left]


def test_more_requests_than_a_step_has_tokens_take_turns() -> None:
    """Those that waited longest first, in rows by order of admission."""
    source = Books("reference", Setting(4, 60, 20))
    for index in range(4):
        source.add([index, index + 1] * 3, 12)
    source.step()
    for most in (1, 2, 3, 4, 5):
        twins = Twins(Setting(4, most, 20), MIXES["all"])
        for books in twins.sides:
            books.import_state(source.export_state())
        twins.act(("step", 4))
        turns = Counter(
            row.request_id for record, _ in twins.records for row in record.rows
        )
        assert len(turns) == 4
        twins.run_dry()


@pytest.mark.parametrize("mix", MIXES)
def test_who_is_to_blame(mix: str) -> None:
    """The request whose row was being planned, also while it runs alone."""
    setting = Setting(snapshot_slots=0, max_tokens_per_step=8, num_blocks=20)
    for before in ((), (("fail", "forward", 0), ("step", 1))):
        twins = Twins(setting, MIXES[mix])
        for action in (*[("add", (0, 1, 0), 5, 3, None)] * 2, ("step", 1), *before):
            twins.act(action)
        twins.act(("fail", "reserve", 0))
        assert list(twins.records[-1][0].failed) == ["r0"]
        twins.act(("fail", "first_missing", 0))
        twins.run_dry()


def two_that_decode(side: str) -> Books:
    """Return two requests of one block each, in a pool that has no more."""
    books = Books(side, Setting(num_blocks=2))
    for token in range(2):
        books.add([token] * BLOCK, 2)
    books.step()
    return books


@pytest.mark.parametrize("index", range(2))
def test_who_decodes_is_to_blame_for_its_block(side: str, index: int) -> None:
    """Neither the one before it nor nobody."""
    books = Books(side, Setting(num_blocks=20))
    for token in range(2):
        books.add([token] * BLOCK, 2)
    books.step()
    books.trap.arm("allocate", index)
    assert list(books.step().failed) == [f"r{index}"]


@pytest.mark.parametrize(("name", "rows"), [("r0", ["r0"]), ("r1", [])])
def test_one_that_decodes_may_run_alone(side: str, name: str, rows: list[str]) -> None:
    """Who came last is preempted for its block, though it be itself."""
    books = two_that_decode(side)
    failed = copy.deepcopy(books).step().plan
    failed.rows[0].request_id = name
    books.scheduler.run_alone(failed)
    plan = books.scheduler.plan()
    assert [row.request_id for row in plan.rows] == rows
    assert plan.preempted == ["r1"]


def test_who_waits_to_run_alone_is_made_room_for(side: str) -> None:
    """What a replayed plan admitted in between is preempted."""
    books = Books(side, Setting(max_requests=1))
    books.add([1])
    books.trap.arm("forward", 0)
    assert books.step().interrupted == ["r0"]
    books.add([2])
    aside = copy.deepcopy(books)
    aside.abort("r0")
    assert [row.request_id for row in books.step(aside.step().plan).rows] == ["r1"]
    record = books.step()
    assert [row.request_id for row in record.rows] == ["r0"]
    assert record.plan.preempted == ["r1"]


def test_a_replay_preempts_when_a_block_is_missing(side: str) -> None:
    """As recorded; without a victim in the plan it is refused."""
    books = two_that_decode(side)
    expected = copy.deepcopy(books).step()
    assert expected.plan.preempted == ["r1"]
    assert expected.plan.evicted_blocks
    found = copy.deepcopy(books).step(expected.plan)
    assert essence(found) == essence(expected)
    expected.plan.preempted.clear()
    reason = books.step(expected.plan).eager_reason
    assert reason == "no block is left for 'r0' to decode"


@pytest.mark.parametrize(
    "setting", [Setting(num_blocks=2), Setting(num_blocks=20, max_requests=1)]
)
def test_a_replay_that_cannot_admit_is_refused(side: str, setting: Setting) -> None:
    """For want of blocks or of a slot."""
    source, heir = Books(side, Setting(num_blocks=20)), Books(side, setting)
    for books in (source, heir):
        books.add([0] * BLOCK)
        books.add([1] * 2 * BLOCK)
    record = heir.step(source.step().plan)
    assert record.eager_reason == "no blocks or slot are left to admit 'r1'"
    assert not record.rows


def test_the_first_admission_is_timed(side: str) -> None:
    """Not a later one."""
    books = Books(side, Setting(max_requests=1))
    books.add([1])
    books.add([2])
    first, second = books.requests
    books.step()
    admitted = first.timings.admitted
    assert admitted is not None
    assert admitted >= first.timings.arrived
    books.scheduler.preempt(first)
    books.step()
    assert first.timings.admitted == admitted
    assert second.timings.admitted is None


def test_who_was_removed_is_not_found(side: str) -> None:
    """To remove it again changes nothing."""
    books = Books(side)
    books.add([1])
    books.add([2])
    books.step()
    request = books.requests[0]
    for _ in range(2):
        books.scheduler.remove(request)
        with pytest.raises(PlanError, match="no unfinished request is named 'r0'"):
            books.scheduler.find("r0")
        books.check()
