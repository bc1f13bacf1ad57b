"""The state slots: which hold the running state of a request, which a stored snapshot.

A *live* slot belongs to one running request, which overwrites it in every step. A
*snapshot* slot holds a copy of the state at a block boundary; it is written once, and
from then on only read. Two more slots belong to nobody: the zero slot and the dummy
slot (`lockstep.memory.Sizes`).

Snapshots are best effort: when no slot can be had there is no snapshot, and the request
goes on without.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lockstep.blocks import BlockHash
from lockstep.errors import IntegrityError
from lockstep.state import StateSlotsState


class Reservation(NamedTuple):
    """A snapshot slot that will be written in this step.

    Attributes:
        slot_id: The slot.
        evicted: Hash of the state that was given up for it, if one was.
    """

    slot_id: int
    evicted: BlockHash | None


class StateSlots:
    """Hands out slot ids and remembers which state is stored where.

    A snapshot is found by the hash of the block that it follows. Its slot is *reserved*
    before the forward pass that writes it and becomes visible by `publish` only after:
    nobody can restore a state that was never computed.
    """

    def __init__(self, max_requests: int, snapshot_slots: int) -> None:
        """Start with every slot free.

        Args:
            max_requests: Live slots, numbered from 0.
            snapshot_slots: Snapshot slots, numbered after the live ones.
        """
        self.max_requests = max_requests
        self.snapshot_slots = snapshot_slots
        self.reset()

    def reset(self) -> None:
        """Forget everything; every slot is free again."""
        snapshots = range(self.max_requests, self.max_requests + self.snapshot_slots)
        self.free_live = list(reversed(range(self.max_requests)))
        self.free_snapshots = list(reversed(snapshots))
        self.stored: dict[BlockHash, int] = {}
        self.reserved: dict[BlockHash, int] = {}
        self.replaceable: set[BlockHash] = set()
        self.pins: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.clock = 0

    @property
    def num_free_live(self) -> int:
        """Live slots that no request owns."""
        return len(self.free_live)

    def allocate_live(self) -> int:
        """Take a live slot; its content is whatever was there before."""
        return self.free_live.pop()

    def free_live_slot(self, slot_id: int) -> None:
        """Give a live slot back."""
        self.free_live.append(slot_id)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Find the slot of a stored state."""
        return self.stored.get(block_hash)

    def pin(self, slot_id: int) -> None:
        """Keep a stored state from being evicted until a step has read it."""
        self.pins[slot_id] = self.pins.get(slot_id, 0) + 1

    def unpin(self, slot_id: int, used: bool) -> None:
        """Undo one `pin`.

        Args:
            slot_id: A pinned slot.
            used: Whether a step has read the state, which keeps it longer.
        """
        self.pins[slot_id] -= 1
        if not self.pins[slot_id]:
            del self.pins[slot_id]
        if used:
            self._touch(slot_id)

    def reserve(
        self, block_hash: BlockHash, replaceable: bool = False
    ) -> Reservation | None:
        """Take a slot for a state that this step will compute, if there is one.

        A free slot is taken first, then that of the least recently used state that no
        row is about to read. A state that is wanted a second time is not replaceable
        any more: more than one request counts on it.

        Args:
            block_hash: Hash of the block that the state follows.
            replaceable: Whether the request will `replace` it by a later one.

        Returns:
            None when that state is stored or reserved already, or no slot can be had.
        """
        if block_hash in self.stored or block_hash in self.reserved:
            self.replaceable.discard(block_hash)
            return None
        evicted = None
        if not self.free_snapshots:
            evicted = self._least_recently_used()
            if evicted is None:
                return None
            self.drop(evicted)
        slot = self.free_snapshots.pop()
        self.reserved[block_hash] = slot
        if replaceable:
            self.replaceable.add(block_hash)
        return Reservation(slot, evicted)

    def cancel(self, block_hash: BlockHash) -> None:
        """Give back a reserved slot that was not, or not wholly, written."""
        slot = self.reserved.pop(block_hash, None)
        if slot is not None:
            self.replaceable.discard(block_hash)
            self.free_snapshots.append(slot)

    def cancel_all(self) -> None:
        """Give back every reserved slot: the step that was to write them failed."""
        for block_hash in list(self.reserved):
            self.cancel(block_hash)

    def publish(self, block_hash: BlockHash) -> None:
        """Make a reserved and written state findable."""
        slot = self.reserved.pop(block_hash)
        self.stored[block_hash] = slot
        self._touch(slot)

    def drop(self, block_hash: BlockHash) -> bool:
        """Forget a stored state, if there is one; says whether there was."""
        slot = self.stored.get(block_hash)
        if slot is None:
            return False
        if slot in self.pins:
            raise IntegrityError(f"state slot {slot} is dropped while a row reads it")
        del self.stored[block_hash], self.last_use[slot]
        self.replaceable.discard(block_hash)
        self.free_snapshots.append(slot)
        return True

    def replace(self, block_hash: BlockHash) -> bool:
        """Forget a state whose request is about to store a later one.

        Only if no other request wanted it, and no row is about to read it; says whether
        it was forgotten.
        """
        is_read = self.stored.get(block_hash) in self.pins
        return block_hash in self.replaceable and not is_read and self.drop(block_hash)

    def export_state(self) -> StateSlotsState:
        """Copy the bookkeeping into its plain form; only between steps."""
        return StateSlotsState(
            free_live=list(self.free_live),
            free_snapshots=list(self.free_snapshots),
            stored=dict(self.stored),
            replaceable=set(self.replaceable),
            last_use=dict(self.last_use),
            clock=self.clock,
        )

    def import_state(self, state: StateSlotsState) -> None:
        """Take over bookkeeping exported by either side."""
        self.reset()
        self.free_live = list(state.free_live)
        self.free_snapshots = list(state.free_snapshots)
        self.stored = dict(state.stored)
        self.replaceable = set(state.replaceable)
        self.last_use = dict(state.last_use)
        self.clock = state.clock

    def check_integrity(
        self, live_slots: Collection[int], cached: Collection[BlockHash]
    ) -> None:
        """Check every invariant; only between steps.

        Args:
            live_slots: Slots of all running requests.
            cached: Hashes of all blocks that have one.

        Raises:
            IntegrityError: One does not hold; the message names the slots.
        """
        live = sorted([*self.free_live, *live_slots])
        if live != list(range(self.max_requests)):
            raise IntegrityError(f"live slots, free and owned, are {live}")
        if self.reserved or self.pins:
            raise IntegrityError(
                f"reserved {list(self.reserved.values())} and pinned {self.pins} slots "
                "are left after a step"
            )
        first = self.max_requests
        snapshots = sorted([*self.free_snapshots, *self.stored.values()])
        if snapshots != list(range(first, first + self.snapshot_slots)):
            raise IntegrityError(f"snapshot slots, free and stored, are {snapshots}")
        if set(self.last_use) != set(self.stored.values()):
            raise IntegrityError("stored slots and slots with a time of use differ")
        if not self.replaceable <= set(self.stored):
            raise IntegrityError("states are called replaceable that are not stored")
        orphans = [slot for key, slot in self.stored.items() if key not in cached]
        if orphans:
            raise IntegrityError(f"slots {orphans} hold states of blocks not cached")

    def _least_recently_used(self) -> BlockHash | None:
        """Find the stored state that was used longest ago and that no row reads."""
        unpinned = [key for key, slot in self.stored.items() if slot not in self.pins]
        return min(
            unpinned, key=lambda key: self.last_use[self.stored[key]], default=None
        )

    def _touch(self, slot_id: int) -> None:
        """Note that a stored state was used now."""
        self.clock += 1
        self.last_use[slot_id] = self.clock
