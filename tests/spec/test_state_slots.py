"""State slots: live ones are lent, snapshots kept by use, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.blocks import ROOT_HASH, BlockHash, hash_block
from lockstep.errors import IntegrityError
from lockstep.state import StateSlotsState
from tests.factories import load

MAX_REQUESTS = 3
SNAPSHOTS = range(MAX_REQUESTS, MAX_REQUESTS + 3)


def make_slots(side: str, snapshot_slots: int = len(SNAPSHOTS)) -> Any:
    """Make slots of which all are free."""
    return load(side, "state_slots").StateSlots(MAX_REQUESTS, snapshot_slots)


def key(name: int) -> BlockHash:
    """Return a hash."""
    return hash_block(ROOT_HASH, [name])


def store(slots: Any, *names: int) -> list[int]:
    """Reserve and publish states, one after another."""
    taken: list[int] = []
    for name in names:
        taken.append(slots.reserve(key(name)).slot_id)
        slots.publish(key(name))
    return taken


def test_live_slots_are_lent(side: str) -> None:
    """Each is owned once, and can be given back in any order."""
    slots = make_slots(side)
    owned = [slots.allocate_live() for _ in range(MAX_REQUESTS)]
    assert sorted(owned) == list(range(MAX_REQUESTS))
    assert slots.num_free_live == 0
    slots.check_integrity(owned, [])
    slots.free_live_slot(owned.pop(1))
    slots.check_integrity(owned, [])
    assert slots.num_free_live == 1
    owned.append(slots.allocate_live())
    assert sorted(owned) == list(range(MAX_REQUESTS))


def test_snapshots_have_slots_of_their_own(side: str) -> None:
    """No state is stored where a request may write."""
    slots = make_slots(side)
    assert sorted(store(slots, 1, 2, 3)) == list(SNAPSHOTS)
    slots.check_integrity([], [key(1), key(2), key(3)])


def test_a_reserved_state_is_not_found_yet(side: str) -> None:
    """Only what was written can be restored."""
    slots = make_slots(side)
    reservation = slots.reserve(key(1))
    assert reservation.evicted is None
    assert slots.lookup(key(1)) is None
    slots.publish(key(1))
    assert slots.lookup(key(1)) == reservation.slot_id
    assert slots.lookup(key(2)) is None


def test_a_state_is_stored_once(side: str) -> None:
    """Two rows that would store one state get one slot, and so do two steps."""
    slots = make_slots(side)
    assert slots.reserve(key(1)) is not None
    assert slots.reserve(key(1)) is None
    slots.publish(key(1))
    assert slots.reserve(key(1)) is None
    slots.check_integrity([], [key(1)])


def test_cancelled_slots_are_free_again(side: str) -> None:
    """A state that was not written leaves nothing behind."""
    slots = make_slots(side)
    first = slots.reserve(key(1))
    slots.cancel(key(1))
    slots.cancel(key(1))
    assert slots.lookup(key(1)) is None
    assert slots.reserve(key(2)) == first
    assert None not in [slots.reserve(key(3)), slots.reserve(key(4))]
    slots.cancel_all()
    slots.check_integrity([], [])
    assert len(set(store(slots, 2, 3, 4))) == 3


def test_dropped_slots_are_free_again(side: str) -> None:
    """A state whose block is given up goes with it."""
    slots = make_slots(side)
    (slot,) = store(slots, 1)
    assert slots.drop(key(1))
    assert not slots.drop(key(1))
    assert slots.lookup(key(1)) is None
    assert slots.reserve(key(2)).slot_id == slot


def test_the_least_recently_used_state_goes_first(side: str) -> None:
    """Storing is a use."""
    slots = make_slots(side)
    first, second, _ = store(slots, 1, 2, 3)
    reservation = slots.reserve(key(4))
    assert (reservation.slot_id, reservation.evicted) == (first, key(1))
    assert slots.lookup(key(1)) is None
    assert slots.reserve(key(5)) == (second, key(2))


@pytest.mark.parametrize(("used", "evicted"), [(True, 2), (False, 1)])
def test_restoring_is_a_use(side: str, used: bool, evicted: int) -> None:
    """A state that a step has read stays longer; one that none has read does not."""
    slots = make_slots(side)
    first, *_ = store(slots, 1, 2, 3)
    slots.pin(first)
    slots.unpin(first, used)
    assert slots.reserve(key(4)).evicted == key(evicted)


def test_pinned_states_are_never_evicted(side: str) -> None:
    """What a row is about to read stays, until every row has read it."""
    slots = make_slots(side)
    first, second, third = store(slots, 1, 2, 3)
    for slot in (first, second, third, first):
        slots.pin(slot)
    slots.unpin(first, used=False)
    assert slots.reserve(key(4)) is None
    slots.unpin(second, used=False)
    assert slots.reserve(key(4)) == (second, key(2))
    assert slots.reserve(key(5)) is None
    assert slots.lookup(key(1)) == first


def test_a_state_is_replaced_only_by_the_request_that_stored_it(side: str) -> None:
    """What was stored to be replaced goes, unless a second request counts on it."""
    slots = make_slots(side)
    for name in (1, 2):
        slots.reserve(key(name), replaceable=True)
        slots.publish(key(name))
    store(slots, 3)
    assert slots.reserve(key(2)) is None
    assert [slots.replace(key(name)) for name in (1, 2, 3, 4)] == [1, 0, 0, 0]
    assert [slots.lookup(key(name)) is None for name in (1, 2, 3)] == [1, 0, 0]


def test_a_state_that_a_row_reads_is_not_replaced(side: str) -> None:
    """A pinned state stays for its reader."""
    slots = make_slots(side)
    slot = slots.reserve(key(1), replaceable=True).slot_id
    slots.publish(key(1))
    slots.pin(slot)
    assert not slots.replace(key(1))
    slots.unpin(slot, used=True)
    assert slots.replace(key(1))


def test_reserved_slots_are_never_evicted(side: str) -> None:
    """A step that stores more states than there are slots stores the first ones."""
    slots = make_slots(side)
    found = [slots.reserve(key(name)) for name in range(5)]
    assert [each is None for each in found] == [0, 0, 0, 1, 1]
    before = sorted(each.slot_id for each in found[:3])
    assert before == list(SNAPSHOTS)


def test_no_slots_no_snapshots(side: str) -> None:
    """Without snapshot slots nothing is stored, and nothing fails."""
    slots = make_slots(side, snapshot_slots=0)
    assert slots.reserve(key(1)) is None
    slots.check_integrity([], [])


def test_a_pinned_state_cannot_be_dropped(side: str) -> None:
    """To give up a block whose state is about to be read is a fault."""
    slots = make_slots(side)
    (slot,) = store(slots, 1)
    slots.pin(slot)
    with pytest.raises(IntegrityError, match=f"slot {slot} is dropped while"):
        slots.drop(key(1))


def test_reset_forgets(side: str) -> None:
    """After a reset every slot can be had, each once."""
    slots = make_slots(side)
    store(slots, 1, 2)
    slots.reserve(key(3))
    slots.allocate_live()
    slots.reset()
    slots.check_integrity([], [])
    assert [slots.lookup(key(name)) for name in (1, 2, 3)] == [None] * 3
    assert sorted(store(slots, 1, 2, 3)) == list(SNAPSHOTS)


# Integrity: every check can fail.

Corruption = Callable[[StateSlotsState], object]


def sound_state() -> StateSlotsState:
    """Return slots of which 0 is live, 3 and 5 are stored, 4 is free."""
    stored = {key(1): 3, key(2): 5}
    return StateSlotsState([2, 1], [4], stored, {3: 1, 5: 2}, clock=2)


def corruptions() -> Iterator[tuple[str, Corruption]]:
    """List a way to make each check fail, with part of its message."""
    yield "live slots.* are .0, 1.", lambda s: s.free_live.remove(2)
    yield "live slots.* are .0, 0, 1, 2.", lambda s: s.free_live.append(0)
    yield "snapshot slots.* are .3, 5.", lambda s: s.free_snapshots.clear()
    yield "snapshot slots.* are .3, 3, 4, 5.", lambda s: s.free_snapshots.append(3)
    yield "snapshot slots.* are .3, 3, 4.", lambda s: s.stored.update({key(2): 3})
    yield "time of use", lambda s: s.last_use.update({4: 1})
    yield "time of use", lambda s: s.last_use.clear()
    yield "called replaceable", lambda s: s.replaceable.add(key(7))


@pytest.mark.parametrize(("message", "corrupt"), list(corruptions()))
def test_integrity_sees(side: str, message: str, corrupt: Corruption) -> None:
    """Slots that were damaged are found out."""
    state, slots = sound_state(), make_slots(side)
    slots.import_state(state)
    slots.check_integrity([0], state.stored)
    corrupt(state)
    slots.import_state(state)
    with pytest.raises(IntegrityError, match=message):
        slots.check_integrity([0], state.stored)


def test_integrity_sees_an_owner_too_many(side: str) -> None:
    """Two requests never write one slot."""
    slots = make_slots(side)
    slots.import_state(sound_state())
    with pytest.raises(IntegrityError, match="live slots"):
        slots.check_integrity([0, 1], sound_state().stored)


def test_integrity_sees_orphans(side: str) -> None:
    """A state whose block is not cached can never be found again."""
    slots = make_slots(side)
    slots.import_state(sound_state())
    with pytest.raises(IntegrityError, match=r"slots \[5\] hold states of blocks not"):
        slots.check_integrity([0], [key(1)])


def test_integrity_sees_what_a_step_left(side: str) -> None:
    """Reservations and pins last no longer than a step."""
    slots = make_slots(side)
    (slot,) = store(slots, 1)
    slots.pin(slot)
    with pytest.raises(IntegrityError, match="left after a step"):
        slots.check_integrity([], [key(1)])
    slots.unpin(slot, used=True)
    slots.reserve(key(2))
    with pytest.raises(IntegrityError, match="snapshot slots|left after a step"):
        slots.check_integrity([], [key(1)])


def test_import_copies(side: str) -> None:
    """Two sets of slots with one origin go their own ways."""
    state, slots = sound_state(), make_slots(side)
    slots.import_state(state)
    exported = slots.export_state()
    slots.allocate_live()
    slots.drop(key(1))
    store(slots, 7, 8, 9)
    assert state == exported == sound_state()


def test_import_forgets(side: str) -> None:
    """What was reserved, pinned or stored before is gone."""
    slots = make_slots(side)
    for slot in store(slots, 7, 8):
        slots.pin(slot)
    slots.reserve(key(9))
    slots.import_state(sound_state())
    slots.check_integrity([0], sound_state().stored)
    assert [slots.lookup(key(name)) for name in (7, 8)] == [None, None]
