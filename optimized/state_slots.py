"""The state slots with clock and pins in arrays, one entry for each slot.

The search for the least recently used state is one pass of numpy over the slots; all
else takes one slot at a time, for which lists and dictionaries are faster than arrays.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lockstep.blocks import BlockHash
from lockstep.errors import IntegrityError
from lockstep.state import StateSlotsState

#: Time of use of a slot that stores nothing: later than any other.
_NEVER = np.iinfo(np.int64).max


class Reservation(NamedTuple):
    """As on the other side."""

    slot_id: int
    evicted: BlockHash | None


class StateSlots:
    """The same slots as the reference's."""

    def __init__(self, max_requests: int, snapshot_slots: int) -> None:
        """Start with every slot free."""
        self.max_requests = max_requests
        self.snapshot_slots = snapshot_slots
        self.reset()

    def reset(self) -> None:
        """Forget everything; every slot is free again."""
        size = self.max_requests + self.snapshot_slots
        self._free_live = list(range(self.max_requests))[::-1]
        self._free_snapshots = list(range(self.max_requests, size))[::-1]
        self._stored: dict[BlockHash, int] = {}
        self._reserved: dict[BlockHash, int] = {}
        self._replaceable: set[BlockHash] = set()
        self._hashes: list[BlockHash | None] = [None] * size
        self._pins = np.zeros(size, np.int64)
        self._last_use = np.full(size, _NEVER)
        self._clock = 0

    @property
    def num_free_live(self) -> int:
        """Live slots that no request owns."""
        return len(self._free_live)

    def allocate_live(self) -> int:
        """Take a live slot."""
        return self._free_live.pop()

    def free_live_slot(self, slot_id: int) -> None:
        """Give a live slot back."""
        self._free_live.append(slot_id)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Find the slot of a stored state."""
        return self._stored.get(block_hash)

    def pin(self, slot_id: int) -> None:
        """Keep a stored state from being evicted."""
        self._pins[slot_id] += 1

    def unpin(self, slot_id: int, used: bool) -> None:
        """Undo one `pin`."""
        self._pins[slot_id] -= 1
        if used:
            self._touch(slot_id)

    def reserve(
        self, block_hash: BlockHash, replaceable: bool = False
    ) -> Reservation | None:
        """Take a slot for a state that this step will compute, if there is one.

        Cost: with no slot free, one pass over all slots.
        """
        if block_hash in self._stored or block_hash in self._reserved:
            self._replaceable.discard(block_hash)
            return None
        evicted = None
        if not self._free_snapshots:
            evicted = self._least_recently_used()
            if evicted is None:
                return None
            self.drop(evicted)
        slot = self._free_snapshots.pop()
        self._reserved[block_hash] = slot
        if replaceable:
            self._replaceable.add(block_hash)
        return Reservation(slot, evicted)

    def cancel(self, block_hash: BlockHash) -> None:
        """Give back a reserved slot that was not, or not wholly, written."""
        slot = self._reserved.pop(block_hash, None)
        if slot is not None:
            self._replaceable.discard(block_hash)
            self._free_snapshots.append(slot)

    def cancel_all(self) -> None:
        """Give back every reserved slot, in order of reservation."""
        self._replaceable -= self._reserved.keys()
        self._free_snapshots += self._reserved.values()
        self._reserved.clear()

    def publish(self, block_hash: BlockHash) -> None:
        """Make a reserved and written state findable."""
        slot = self._reserved.pop(block_hash)
        self._stored[block_hash] = slot
        self._hashes[slot] = block_hash
        self._touch(slot)

    def drop(self, block_hash: BlockHash) -> bool:
        """Forget a stored state, if there is one; says whether there was."""
        slot = self._stored.get(block_hash)
        if slot is None:
            return False
        if self._pins[slot]:
            raise IntegrityError(f"state slot {slot} is dropped while a row reads it")
        del self._stored[block_hash]
        self._replaceable.discard(block_hash)
        self._hashes[slot] = None
        self._last_use[slot] = _NEVER
        self._free_snapshots.append(slot)
        return True

    def replace(self, block_hash: BlockHash) -> bool:
        """Forget a state whose request is about to store a later one."""
        slot = self._stored.get(block_hash)
        is_idle = slot is not None and not self._pins[slot]
        return is_idle and block_hash in self._replaceable and self.drop(block_hash)

    def export_state(self) -> StateSlotsState:
        """Copy the bookkeeping into its plain form; only between steps."""
        slots = list(self._stored.values())
        uses = self._last_use[slots].tolist()
        return StateSlotsState(
            free_live=list(self._free_live),
            free_snapshots=list(self._free_snapshots),
            stored=dict(self._stored),
            replaceable=set(self._replaceable),
            last_use=dict(zip(slots, uses, strict=True)),
            clock=self._clock,
        )

    def import_state(self, state: StateSlotsState) -> None:
        """Take over bookkeeping exported by either side."""
        self.reset()
        self._free_live = list(state.free_live)
        self._free_snapshots = list(state.free_snapshots)
        self._stored = dict(state.stored)
        self._replaceable = set(state.replaceable)
        for block_hash, slot in state.stored.items():
            self._hashes[slot] = block_hash
        self._last_use[list(state.last_use)] = list(state.last_use.values())
        self._clock = state.clock

    def check_integrity(
        self, live_slots: Collection[int], cached: Collection[BlockHash]
    ) -> None:
        """Check every invariant; only between steps."""
        live = sorted([*self._free_live, *live_slots])
        if live != list(range(self.max_requests)):
            raise IntegrityError(f"live slots, free and owned, are {live}")
        pinned = np.flatnonzero(self._pins).tolist()
        if self._reserved or pinned:
            raise IntegrityError(
                f"reserved {list(self._reserved.values())} and pinned {pinned} slots "
                "are left after a step"
            )
        size = self.max_requests + self.snapshot_slots
        snapshots = sorted([*self._free_snapshots, *self._stored.values()])
        if snapshots != list(range(self.max_requests, size)):
            raise IntegrityError(f"snapshot slots, free and stored, are {snapshots}")
        self._check_stored()
        if not self._replaceable <= set(self._stored):
            raise IntegrityError("states are called replaceable that are not stored")
        orphans = [slot for key, slot in self._stored.items() if key not in cached]
        if orphans:
            raise IntegrityError(f"slots {orphans} hold states of blocks not cached")

    def _check_stored(self) -> None:
        stored = sorted(self._stored.values())
        if np.flatnonzero(self._last_use != _NEVER).tolist() != stored:
            raise IntegrityError("stored slots and slots with a time of use differ")
        known = {key: slot for slot, key in enumerate(self._hashes) if key is not None}
        if known != self._stored:
            raise IntegrityError("the two maps of stored states are not inverse")

    def _least_recently_used(self) -> BlockHash | None:
        if not self.snapshot_slots:
            return None
        uses = np.where(self._pins > 0, _NEVER, self._last_use)
        slot = int(uses.argmin())
        return self._hashes[slot] if uses[slot] != _NEVER else None

    def _touch(self, slot_id: int) -> None:
        self._clock += 1
        self._last_use[slot_id] = self._clock
