"""The prefix cache against its twin: same answers and same state, call by call."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from lockstep.errors import PlanError
from lockstep.plan import RowKind, RowPlan, StepPlan
from lockstep.request import Request
from tests.books import BLOCK, Books, Fault, make_request, prompt_of, random_setting
from tests.conftest import SIDES

CALLS = (
    *("admit", "admit", "compute", "compute", "compute", "decode", "decode", "release"),
    *("match", "fail", "reset"),
)


class User:
    """Calls a cache by the rules of a scheduler; methods return all that they saw."""

    def __init__(self, side: str, seed: int) -> None:
        """Begin with an empty cache of some size."""
        self.source = random.Random(seed)
        setting = random_setting(self.source)
        self.books = Books(side, setting)
        self.cache = self.books.cache
        self.running: list[Request] = []
        self.arrivals = 0

    def call(self) -> object:
        """Do something at random; the same on both sides."""
        name = self.source.choice(CALLS)
        return name, getattr(self, name)()

    def seen(self) -> object:
        """Return all that can be seen between two steps."""
        requests = [{**vars(r), "timings": None} for r in self.running]
        pools = self.books.blocks, self.books.slots
        return requests, [pool.export_state() for pool in pools]

    def end(self) -> None:
        """Let all go, and check every invariant."""
        while self.running:
            self.release()
        self.books.check()

    def _new(self) -> Request:
        path = [self.source.choice((0, 0, 1)) for _ in range(self.source.randrange(5))]
        reports_from = self.source.choice((None, None, 0, 5))
        prompt = prompt_of(path, self.source.choice((0, 1, 3)))
        self.arrivals += 1
        return make_request(self.arrivals, prompt, 9, reports_from)

    def match(self) -> object:
        """Look a prompt up, whole and up to the first gap."""
        request = self._new()
        found = self.cache.first_missing(request), self.cache.match(request)
        return found[0], tuple(found[1]), request.hashes

    def admit(self) -> object:
        """Admit a prompt, and sometimes skip what a plan says."""
        request, plan = self._new(), StepPlan()
        skip = self.source.choice((None, None, None, 0, 1, BLOCK, 2 * BLOCK))
        try:
            admitted = self.cache.admit(request, plan, skip)
        except PlanError as error:
            return str(error)
        if admitted:
            self.running.append(request)
        return plan, admitted, {**vars(request), "timings": None}

    def _choose(self) -> Request | None:
        return self.source.choice(self.running) if self.running else None

    def compute(self) -> object:
        """Compute a slice of a prompt, or a token after it."""
        request = self._choose()
        if request is None or request.num_computed >= request.prefill_end:
            return None
        start, plan = request.num_computed, StepPlan()
        end = self.source.randrange(start, request.prefill_end) + 1
        kept = self.cache.reserve_prefill_snapshots(request, start, end, plan)
        if self.source.random() < 0.1:
            self.cache.cancel_reservations()
            return plan, kept
        return plan, kept, self._commit(request, RowKind.PREFILL, end, kept)

    def decode(self) -> object:
        """Make room for a token, and compute it."""
        request, plan = self._choose(), StepPlan()
        if request is None or request.num_computed < request.prefill_end:
            return None
        request.token_ids.append(self.source.randrange(2))
        grown = self.cache.grow(request, plan)
        assert grown is True or grown is False
        if not grown:
            request.token_ids.pop()
            return plan
        end = request.num_computed + 1
        kept = self.cache.reserve_decode_snapshot(request, end, plan)
        return plan, kept, self._commit(request, RowKind.DECODE, end, kept)

    def _commit(self, request: Request, kind: RowKind, end: int, kept: Any) -> object:
        row = RowPlan("", kind, request.num_computed, end, True, 0, 0, [], 0, kept)
        found = self.cache.commit(request, row)
        request.num_computed = end
        return tuple(found)

    def release(self) -> object:
        """Let a request go."""
        request = self._choose()
        if request is not None:
            self.running.remove(request)
            self.cache.release(request)
        return request and {**vars(request), "timings": None}

    def fail(self) -> object:
        """Admit a prompt, but for a fault while its blocks are taken."""
        trap = self.books.trap
        trap.arm("allocate", 0)
        try:
            return self.admit()
        except Fault as fault:
            return repr(fault)
        finally:
            trap.arm("", 0)

    def reset(self) -> object:
        """Forget all, rarely."""
        if not self.running:
            self.cache.reset()
        return None


@pytest.mark.parametrize("part", range(5))
def test_any_calls(part: int) -> None:
    """Twins answer alike, whatever is asked, and stay equal."""
    for seed in range(40 * part, 40 * part + 40):
        sides = [User(side, seed) for side in SIDES]
        for _ in range(60):
            answers = [copy.deepcopy(user.call()) for user in sides]
            assert answers[1] == answers[0]
            assert sides[1].seen() == sides[0].seen()
        for user in sides:
            user.end()
        assert sides[1].seen() == sides[0].seen()


def test_the_first_gap_is_found_by_few_look_ups() -> None:
    """As many as the number of blocks has digits."""
    books = Books("optimized")
    asked: list[bytes] = []
    request = make_request(0, [1, 2] * 500 * BLOCK)
    request.update_hashes(BLOCK)
    cached = set(request.hashes[:617])

    def lookup(key: bytes) -> int | None:
        asked.append(key)
        return 1 if key in cached else None

    books.blocks.lookup = lookup
    assert books.cache.first_missing(request) == request.hashes[617]
    assert len(asked) <= len(request.hashes).bit_length()


def test_a_prompt_without_room_is_not_matched() -> None:
    """Where even all that can be evicted is too little, that is all there is to see."""
    books = Books("optimized")
    matched: list[object] = []
    books.blocks.match = matched.append
    request = make_request(0, [1] * BLOCK * 11)
    assert books.cache.admit(request, StepPlan()) is False
    assert matched == []
