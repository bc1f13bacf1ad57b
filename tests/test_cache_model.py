"""The cache model itself: its definitions on small cases, and what it notices.

That engines agree with it is shown step by step in the random traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lockstep.assemble import build_components

from .books import BLOCK, Action, Books, Setting, act, random_trace
from .cache_model import (
    CacheModel,
    Expected,
    Prefix,
    User,
    assert_agrees,
    assert_same_content,
)
from .test_traces import DIRECTED, EVICTION_THEN_PREEMPTION
from .traces import Add, Player, Step, Symbols, Trace, Turn

#: The side under test is that of the bookkeeping.
MODULE = "scheduler"

SIZE = 2
ABC = (1, 1, 2, 2, 3, 3)


def model_with(
    cached: Iterable[Prefix], states: Iterable[Prefix] = (), **options: Any
) -> CacheModel:
    """Return a model that holds some prefixes, those named first unused longest."""
    settings = {"forgets_unused": False, "has_states": True, **options}
    model = CacheModel(8, SIZE, snapshot_slots=4, **settings)
    model.kv = {prefix: time for time, prefix in enumerate(cached)}
    model.states = {prefix: time for time, prefix in enumerate(states)}
    return model


@pytest.mark.parametrize(
    ("cached", "states", "expected"),
    [
        # Nothing cached; and a gap, after which nothing counts.
        ([], [], (0, 0, 0)),
        ([ABC[:2], ABC], [ABC], (2, 0, 0)),
        # The deepest state within the match, not a deeper one, not a shallower one.
        ([ABC[:2], ABC[:4]], [ABC[:2], ABC[:4]], (4, 4, 4)),
        ([ABC[:2], ABC[:4]], [ABC[:2]], (4, 2, 2)),
        # All is cached: one token must be computed, so an earlier state has to do.
        ([ABC[:2], ABC[:4], ABC], [ABC[:2], ABC], (6, 6, 2)),
        ([ABC[:2], ABC[:4], ABC], [ABC], (6, 6, 0)),
    ],
)
def test_match_is_the_longest_prefix_with_a_state(
    cached: list[Prefix], states: list[Prefix], expected: tuple[int, int, int]
) -> None:
    """Tokens in K/V, depth of the deepest state, and tokens skipped."""
    assert model_with(cached, states).match(ABC) == expected


def test_without_states_any_position_will_do() -> None:
    """All but one token is skipped, block boundary or not."""
    model = model_with([ABC[:2], ABC[:4], ABC], has_states=False)
    assert model.match(ABC) == (6, 6, 5)


def test_eviction_takes_the_longest_unused_end_of_a_chain() -> None:
    """Never what another prefix continues, nor what a request uses."""
    other = (9, 9)
    model = model_with([ABC[:2], ABC[:4], other], [ABC[:4]])
    expected = Expected()
    model.evict(expected)
    assert expected.evicted_blocks == expected.evicted_states == [ABC[:4]]
    model.users["r"] = User([*ABC], known=1, places=1)
    model.evict(expected)
    assert expected.evicted_blocks == [ABC[:4], other]
    assert model.available == model.free == 7


def test_unused_prefixes_are_forgotten_or_stay() -> None:
    """With ``ref_zero`` a prefix and its state go with their last user."""
    for forgets in (True, False):
        model = model_with([ABC[:2]], [ABC[:2]], forgets_unused=forgets)
        model.users["a"] = User([*ABC], known=1, places=1)
        model.users["b"] = User([*ABC], known=1, places=1)
        model.leave("a")
        assert ABC[:2] in model.kv
        model.leave("b")
        assert (ABC[:2] in model.kv) is (ABC[:2] in model.states) is not forgets


def _evicts_the_newest(parts: Any) -> dict[str, Any]:
    class BlockPool(parts.BlockPool):
        def _evict_one(self) -> Any:
            covered = set(self.parents.values())
            idle = [b for b in self.hashes if not self.holders[b] and b not in covered]
            return self._forget(max(idle, key=lambda block: self.last_use[block]))

    return {"kv_blocks.BlockPool": BlockPool}


def _evicts_parents(parts: Any) -> dict[str, Any]:
    class BlockPool(parts.BlockPool):
        def _evict_one(self) -> Any:
            idle = [block for block in self.hashes if not self.holders[block]]
            return self._forget(min(idle, key=lambda block: self.last_use[block]))

    return {"kv_blocks.BlockPool": BlockPool}


def _counts_a_look_as_use(parts: Any) -> dict[str, Any]:
    class StateSlots(parts.StateSlots):
        def lookup(self, block_hash: Any) -> Any:
            slot = super().lookup(block_hash)
            if slot is not None:
                self._touch(slot)
            return slot

    return {"state_slots.StateSlots": StateSlots}


def _evicts_any_state(parts: Any) -> dict[str, Any]:
    class StateSlots(parts.StateSlots):
        def _least_recently_used(self) -> Any:
            free = [key for key, slot in self.stored.items() if slot not in self.pins]
            return max(
                free, key=lambda key: self.last_use[self.stored[key]], default=None
            )

    return {"state_slots.StateSlots": StateSlots}


def _matches_less(parts: Any) -> dict[str, Any]:
    class PrefixCache(parts.PrefixCache):
        def match(self, request: Any) -> Any:
            found = super().match(request)
            return found._replace(state_positions=found.state_positions[:1])

    return {"prefix_cache.PrefixCache": PrefixCache}


def _keeps_old_decode_states(parts: Any) -> dict[str, Any]:
    class PrefixCache(parts.PrefixCache):
        def reserve_decode_snapshot(self, request: Any, *args: Any) -> Any:
            request.decode_snapshot = None
            return super().reserve_decode_snapshot(request, *args)

    return {"prefix_cache.PrefixCache": PrefixCache}


class Agreeing:
    """Bookkeeping with the cache model beside it."""

    def __init__(self, side: str, setting: Setting) -> None:
        """Begin with both empty."""
        self.books = Books(side, setting)
        self.model = CacheModel(
            setting.num_blocks,
            BLOCK,
            setting.snapshot_slots,
            setting.eviction == "ref_zero",
            setting.needs_state,
            setting.enabled,
        )

    def play(self, actions: list[Action]) -> None:
        """Do all, then step until nothing is left, and compare after each."""
        for action in actions:
            self._act(action)
        for _ in range(400):
            if not self.books.scheduler.has_work:
                return
            self._act(("step", 1))
        raise AssertionError("no end of steps")

    def _act(self, action: Action) -> None:
        if action[0] == "step":
            for _ in range(action[1]):
                assert_agrees(self.model, self.books, self.books.step())
                self.books.check()
            return
        before = self.books.requests
        act(self.books, action)
        after = self.books.requests
        for request in before:
            if request not in after:
                self.model.leave(request.request_id)
        for request in after:
            if request not in before:
                reports = request.sampling.prompt_logprobs is not None
                first = request.sampling.prompt_logprobs_from if reports else None
                name, prompt = request.request_id, request.prompt_token_ids
                self.model.arrive(name, prompt, first)
        if action == ("reset", False):
            self.model.forget_all()
        assert_same_content(self.model, self.books)


#: Chats whose states and blocks have to make way for each other.
_CHATS = (
    *(Add((0, 0), 1, 18), Step(40), Add((1, 1), 1, 2), Step(9), Add((0, 0), 2, 2)),
    *(Step(9), Turn(2, 3, 3), Step(9), Add((1, 0), 3, 33), Step(50), Turn(0, 3, 3)),
    *(Step(9), Add((0, 0, 1), 0, 2), Step(9), Add((1, 1, 1), 0, 2), Step(9)),
)
#: The state after ``(0,)`` is passed over for a deeper one, and is then the oldest.
_PASSED_OVER = (
    *(Add((0,)), Step(9), Add((1,)), Step(9), Add((0, 0)), Step(9), Add((1,), 2)),
    *(Step(9), Add((0, 0), 2), Step(9), Add((2,))),
)
_TRACES = [
    Trace(_PASSED_OVER, snapshot_slots=3),
    *DIRECTED.values(),
    EVICTION_THEN_PREEMPTION,
    *(Trace(_CHATS, num_blocks=n, snapshot_slots=s) for n in (6, 8) for s in (1, 2, 9)),
]


@pytest.mark.parametrize(
    "fault",
    [
        _evicts_the_newest,
        _evicts_parents,
        _counts_a_look_as_use,
        _evicts_any_state,
        _matches_less,
        _keeps_old_decode_states,
    ],
)
def test_another_policy_is_noticed(fault: Callable[[Any], dict[str, Any]]) -> None:
    """Outputs would still be right; only the model can tell."""
    model = Symbols("reference")
    model.components |= fault(build_components("reference"))
    with pytest.raises(AssertionError):
        for trace in _TRACES:
            Player(trace, model).play()


def test_these_traces_agree_without_fault(side: str) -> None:
    """So what is noticed above is the fault."""
    for trace in _TRACES:
        Player(trace, Symbols("reference", bookkeeping=side)).play()


@pytest.mark.parametrize("part", range(2))
def test_random_traces_agree(side: str, part: int) -> None:
    """Very many short ones, without an engine around the bookkeeping."""
    for seed in range(40 * part, 40 * part + 40):
        setting, actions = random_trace(seed, has_faults=False)
        Agreeing(side, setting).play(actions)
