"""State slots against their twin: same slots, same evictions, after any operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.blocks import ROOT_HASH, BlockHash, hash_block
from lockstep.errors import IntegrityError
from lockstep.state import StateSlotsState
from tests.conftest import SIDES
from tests.factories import load


def key(name: int) -> BlockHash:
    """Return a hash."""
    return hash_block(ROOT_HASH, [name])


class User:
    """Uses slots by the rules of their callers; methods return what they answered."""

    def __init__(self, side: str, max_requests: int, snapshot_slots: int) -> None:
        """Start with every slot free."""
        self.slots: Any = load(side, "state_slots").StateSlots(
            max_requests, snapshot_slots
        )
        self.live: list[int] = []
        self.pinned: list[int] = []
        self.reserved: list[BlockHash] = []

    def allocate_live(self, _: int) -> object:
        """Take a live slot, if one is free."""
        if self.slots.num_free_live:
            self.live.append(self.slots.allocate_live())
        return list(self.live)

    def free_live(self, name: int) -> object:
        """Give some live slot back."""
        if self.live:
            self.slots.free_live_slot(self.live.pop(name % len(self.live)))
        return self.slots.num_free_live

    def reserve(self, name: int) -> object:
        """Reserve a slot."""
        found = self.slots.reserve(key(name), replaceable=name % 2 == 0)
        if found is not None:
            self.reserved.append(key(name))
        return found and tuple(found)

    def publish(self, _: int) -> object:
        """Publish the earliest reservation."""
        if self.reserved:
            self.slots.publish(self.reserved.pop(0))
        return None

    def cancel(self, name: int) -> object:
        """Cancel a reservation, if there is one."""
        self.slots.cancel(key(name))
        self.reserved = [each for each in self.reserved if each != key(name)]
        return None

    def cancel_all(self, _: int) -> object:
        """Cancel every reservation."""
        self.slots.cancel_all()
        self.reserved = []
        return None

    def pin(self, name: int) -> object:
        """Pin a stored state."""
        slot = self.slots.lookup(key(name))
        if slot is not None:
            self.slots.pin(slot)
            self.pinned.append(slot)
        return slot

    def unpin(self, name: int) -> object:
        """Undo some pin; every second one was a use."""
        if self.pinned:
            slot = self.pinned.pop(name % len(self.pinned))
            self.slots.unpin(slot, used=name % 2 == 0)
        return None

    def drop(self, name: int) -> object:
        """Drop a state that nobody is about to read."""
        if self.slots.lookup(key(name)) in self.pinned:
            return None
        return self.slots.drop(key(name))

    def replace(self, name: int) -> object:
        """Drop a state if it may be replaced."""
        return self.slots.replace(key(name))

    def seen(self) -> object:
        """Return all that can be seen."""
        return self.slots.export_state(), self.slots.num_free_live

    def end_step(self) -> None:
        """Leave neither reservations nor pins."""
        self.cancel_all(0)
        while self.pinned:
            self.unpin(0)


OPERATIONS = st.tuples(
    st.sampled_from(
        "allocate_live free_live reserve reserve publish publish cancel cancel_all pin "
        "unpin drop replace".split()
    ),
    st.integers(0, 7),
)
TRACES = st.lists(OPERATIONS, min_size=1, max_size=60)


@given(trace=TRACES, snapshot_slots=st.integers(0, 5), max_requests=st.integers(1, 3))
def test_any_operations(
    trace: list[tuple[str, int]], snapshot_slots: int, max_requests: int
) -> None:
    """Twins answer alike, whatever is asked, and stay equal."""
    sides = [User(side, max_requests, snapshot_slots) for side in SIDES]
    for operation, name in trace:
        answers = [getattr(side, operation)(name) for side in sides]
        assert answers[0] == answers[1], operation
        assert sides[0].seen() == sides[1].seen()
    for side in sides:
        side.end_step()
        cached = side.slots.export_state().stored
        side.slots.check_integrity(side.live, cached)
    assert sides[0].seen() == sides[1].seen()


@given(before=TRACES, after=TRACES, swap=st.booleans())
def test_either_side_takes_over(
    before: list[tuple[str, int]], after: list[tuple[str, int]], swap: bool
) -> None:
    """Slots that took over the other's state go on as those do."""
    source, heir = [User(side, 2, 3) for side in SIDES[:: -1 if swap else 1]]
    for operation, name in before:
        getattr(source, operation)(name)
    source.end_step()
    heir.slots.import_state(source.slots.export_state())
    heir.live = list(source.live)
    for operation, name in after:
        answers = [getattr(side, operation)(name) for side in (source, heir)]
        assert answers[0] == answers[1], operation
        assert source.seen() == heir.seen()


def test_integrity_sees_maps_that_differ() -> None:
    """What only the optimized side keeps is checked too."""
    user = User("optimized", 1, 2)
    user.reserve(1)
    user.publish(1)
    user.slots.check_integrity([], [key(1)])
    user.slots._hashes[user.slots.lookup(key(1))] = key(2)
    with pytest.raises(IntegrityError, match="not inverse$"):
        user.slots.check_integrity([], [key(1)])


def own_twice(state: StateSlotsState) -> None:
    """A live slot is free twice."""
    state.free_live.append(0)


def lose_snapshot(state: StateSlotsState) -> None:
    """A snapshot slot is neither free nor stored."""
    state.free_snapshots.pop()


def lose_time_of_use(state: StateSlotsState) -> None:
    """A stored state was never used."""
    state.last_use.popitem()


def replace_nothing(state: StateSlotsState) -> None:
    """A state may be replaced that is not stored."""
    state.replaceable.add(key(7))


def forget_block(state: StateSlotsState) -> None:
    """A state is stored on a block that is not cached."""
    state.stored = {key(6) if k == key(1) else k: s for k, s in state.stored.items()}


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (own_twice, r"live slots, free and owned, are \[0, 0, 1\]"),
        (lose_snapshot, r"snapshot slots, free and stored, are \[2, 3, 4\]"),
        (lose_time_of_use, "stored slots and slots with a time of use differ"),
        (replace_nothing, "states are called replaceable that are not stored"),
        (forget_block, r"slots \[\d\] hold states of blocks not cached"),
    ],
)
def test_both_say_the_same_of_broken_books(corrupt: Any, message: str) -> None:
    """Word for word."""
    source = User("reference", 2, 4)
    for name in (1, 2, 4):
        source.reserve(name)
        source.publish(name)
    said: list[str] = []
    for side in SIDES:
        heir = User(side, 2, 4)
        state = copy.deepcopy(source.slots.export_state())
        corrupt(state)
        heir.slots.import_state(state)
        with pytest.raises(IntegrityError, match=rf"{message}$") as caught:
            heir.slots.check_integrity([], [key(1), key(2), key(4)])
        said.append(str(caught.value))
    assert said[0] == said[1]
