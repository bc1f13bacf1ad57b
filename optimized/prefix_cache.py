"""The prefix cache, which looks no further than its answer needs.

What is cached of a prompt is always a beginning of it: a block is registered on top of
a cached one, and evicted before it. So where the match ends is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.blocks import BlockHash, num_blocks_for
from lockstep.config import Sizes
from lockstep.errors import OutOfBlocksError, PlanError
from lockstep.plan import CacheReport, RowPlan, SkipLimit, SnapshotPlan, StepPlan
from lockstep.policy import decide_skip, snapshot_points
from lockstep.request import Request

from .kv_blocks import BlockPool
from .state_slots import StateSlots


class Match(NamedTuple):
    """As on the other side."""

    block_ids: list[int]
    state_positions: list[int]


class PrefixCache:
    """The same answers as the reference's."""

    def __init__(
        self,
        blocks: Any,
        slots: Any,
        sizes: Sizes,
        needs_state: bool,
        enabled: bool,
    ) -> None:
        """Begin empty."""
        self.blocks: BlockPool = blocks
        self.slots: StateSlots = slots
        self.sizes = sizes
        self.needs_state = needs_state
        self.enabled = enabled
        self._keeps_states = enabled and needs_state
        self._snapshot_slots = range(sizes.first_snapshot_slot, sizes.zero_slot)

    def match(self, request: Request) -> Match:
        """Look up a request's tokens: two look-ups for each block found."""
        if not self.enabled:
            return Match([], [])
        size = self.sizes.block_size
        request.update_hashes(size)
        block_ids = self.blocks.match(request.hashes)
        if not self.needs_state:
            return Match(block_ids, [])
        ends = range(size, (len(block_ids) + 1) * size, size)
        slots = map(self.slots.lookup, request.hashes)
        # The shorter one, that of what was found, ends the pairs.
        pairs = zip(ends, slots, strict=False)
        return Match(block_ids, [end for end, slot in pairs if slot is not None])

    def first_missing(self, request: Request) -> BlockHash | None:
        """Bisect: as many look-ups as the number of blocks has binary digits."""
        found = self._count_cached(request)
        return request.hashes[found] if found < len(request.hashes) else None

    def admit(self, request: Request, plan: StepPlan, skip: int | None = None) -> bool:
        """Reserve all that a request needs for its whole prompt, or nothing.

        Cost: bisection alone where even all that can be evicted is too little, which
        is what a full engine finds in every step.
        """
        if not self.slots.num_free_live:
            return False
        if skip is None and self._is_hopeless(request):
            return False
        match = self.match(request)
        length = len(request.token_ids)
        report = self._report(request, match, skip)
        start = report.num_skipped_tokens
        source = self._state_slot(request, start)
        missing = num_blocks_for(length, self.sizes.block_size) - len(match.block_ids)
        taken = self._reserve_all(match.block_ids, source, missing, plan)
        if taken is None:
            return False
        request.block_table = match.block_ids + taken
        request.num_shared_blocks = len(match.block_ids)
        request.num_registered_blocks = len(match.block_ids)
        request.branch = report.matched_kv_tokens
        request.num_computed = start
        request.prefill_end = length
        request.slot_id = self.slots.allocate_live()
        request.initial_slot_id = self.sizes.zero_slot if source is None else source
        request.admission_report = report
        return True

    def grow(self, request: Request, plan: StepPlan) -> bool:
        """Make room for one more token; no call where there is."""
        missing = num_blocks_for(request.num_computed + 1, self.sizes.block_size)
        missing -= len(request.block_table)
        if missing <= 0:
            return True
        try:
            request.block_table += self._allocate(missing, plan)
        except OutOfBlocksError:
            return False
        return True

    def reserve_prefill_snapshots(
        self, request: Request, start: int, end: int, plan: StepPlan
    ) -> list[SnapshotPlan]:
        """Reserve slots for the states that a prefill slice should leave behind."""
        if not self._keeps_states:
            return []
        points = snapshot_points(
            start, end, request.prefill_end, request.branch, self.sizes.block_size
        )
        found = [self._reserve(request, point, plan) for point in points]
        kept = [snapshot for snapshot in found if snapshot is not None]
        return sorted(kept, key=lambda snapshot: snapshot.position)

    def reserve_decode_snapshot(
        self, request: Request, end: int, plan: StepPlan
    ) -> list[SnapshotPlan]:
        """Reserve a slot for the state at a block boundary reached in decode."""
        if end % self.sizes.block_size or not self._keeps_states:
            return []
        if request.decode_snapshot is not None:
            self.slots.replace(request.decode_snapshot)
        request.update_hashes(self.sizes.block_size)
        snapshot = self._reserve(request, end, plan, replaceable=True)
        request.decode_snapshot = snapshot and snapshot.block_hash
        return [] if snapshot is None else [snapshot]

    def commit(self, request: Request, row: RowPlan) -> tuple[list[BlockHash], ...]:
        """Publish what a row has computed.

        Cost: for a row that completes no block and keeps no state, a comparison.
        """
        registered: list[BlockHash] = []
        completed = row.end // self.sizes.block_size
        if self.enabled and completed > request.num_registered_blocks:
            registered = self._register(request, completed)
        for snapshot in row.snapshots:
            self.slots.publish(snapshot.block_hash)
        self.finish_restore(request)
        return registered, [snapshot.block_hash for snapshot in row.snapshots]

    def finish_restore(self, request: Request) -> None:
        """Let go of the snapshot that a row started from."""
        assert request.slot_id is not None
        if request.initial_slot_id in self._snapshot_slots:
            self.slots.unpin(request.initial_slot_id, used=True)
        request.initial_slot_id = request.slot_id

    def release(self, request: Request) -> None:
        """Take back a running request's blocks and slot; full blocks stay cached."""
        assert request.slot_id is not None
        self.finish_restore(request)
        self._drop_states(self.blocks.release(request.block_table))
        self.slots.free_live_slot(request.slot_id)
        request.block_table = []
        request.slot_id = None
        request.num_computed = 0
        request.num_shared_blocks = 0
        request.num_registered_blocks = 0
        request.branch = 0

    def cancel_reservations(self) -> None:
        """Give back the slots that a failed step was to write."""
        self.slots.cancel_all()

    def reset(self) -> None:
        """Forget all content; no request may be running."""
        self.blocks.reset()
        self.slots.reset()

    def _count_cached(self, request: Request) -> int:
        """Count the leading blocks that are cached."""
        if not self.enabled:
            return 0
        request.update_hashes(self.sizes.block_size)
        lookup = self.blocks.lookup
        return bisect_left(request.hashes, True, key=lambda key: lookup(key) is None)

    def _is_hopeless(self, request: Request) -> bool:
        """Say whether too few blocks are free or can be evicted, whatever is matched.

        What is matched cannot be evicted any more, so there may be too few all the
        same.
        """
        needed = num_blocks_for(len(request.token_ids), self.sizes.block_size)
        most = self.blocks.num_free + self.blocks.num_evictable
        return needed - self._count_cached(request) > most

    def _report(
        self, request: Request, match: Match, forced: int | None
    ) -> CacheReport:
        """Decide what to skip, or check what a recorded plan skipped."""
        if not self.enabled:
            return CacheReport(
                limit=SkipLimit.CACHING_OFF, reason="prefix caching is off"
            )
        matched = len(match.block_ids) * self.sizes.block_size
        states, length = match.state_positions, len(request.token_ids)
        wanted = request.prompt_logit_positions
        report = decide_skip(
            length,
            matched,
            states,
            self.sizes.block_size,
            self.needs_state,
            wanted.start if wanted else None,
        )
        if forced is None or forced == report.num_skipped_tokens:
            return report
        possible = forced in states if self.needs_state else forced <= matched
        last = wanted.start if wanted else length - 1
        if forced and (not possible or forced > last):
            raise PlanError(
                f"the plan skips {forced} of {length} tokens; {matched} are cached, "
                f"with states at {states}, and logits are wanted after token {last}"
            )
        return replace(report, num_skipped_tokens=forced)

    def _state_slot(self, request: Request, position: int) -> int | None:
        """Find the stored state to start from; none at the first token."""
        if not self.needs_state or position == 0:
            return None
        block_hash = request.hashes[position // self.sizes.block_size - 1]
        slot = self.slots.lookup(block_hash)
        assert slot is not None, f"no state is stored at {position}"
        return slot

    def _reserve_all(
        self, matched: list[int], source: int | None, missing: int, plan: StepPlan
    ) -> list[int] | None:
        """Pin the match, then take the missing blocks; undone whole on any failure."""
        self.blocks.pin(matched)
        if source is not None:
            self.slots.pin(source)
        try:
            return self._allocate(missing, plan)
        except BaseException as error:
            self.blocks.unpin(matched)
            if source is not None:
                self.slots.unpin(source, used=False)
            if not isinstance(error, OutOfBlocksError):
                raise
        return None

    def _allocate(self, count: int, plan: StepPlan) -> list[int]:
        """Take blocks; whatever is evicted for them takes its state along."""
        allocation = self.blocks.allocate(count)
        plan.evicted_blocks += allocation.evicted
        plan.evicted_states += self._drop_states(allocation.evicted)
        return allocation.block_ids

    def _drop_states(self, block_hashes: list[BlockHash]) -> list[BlockHash]:
        """Forget the states of lost blocks; returns those that had one."""
        return [key for key in block_hashes if self.slots.drop(key)]

    def _reserve(
        self,
        request: Request,
        position: int,
        plan: StepPlan,
        replaceable: bool = False,
    ) -> SnapshotPlan | None:
        """Reserve a slot for the state at one block boundary, if there is one."""
        block_hash = request.hashes[position // self.sizes.block_size - 1]
        reservation = self.slots.reserve(block_hash, replaceable)
        if reservation is None:
            return None
        if reservation.evicted is not None:
            plan.evicted_states.append(reservation.evicted)
        return SnapshotPlan(position, reservation.slot_id, block_hash)

    def _register(self, request: Request, completed: int) -> list[BlockHash]:
        """Make the blocks known up to a number of completed ones, in order.

        Each is noted at once, so that a failure leaves a table that can be released.
        """
        request.update_hashes(self.sizes.block_size)
        first, table = request.num_registered_blocks, request.block_table
        parent = table[first - 1] if first else None
        new: list[BlockHash] = []
        for index in range(first, completed):
            own, block_hash = table[index], request.hashes[index]
            table[index] = parent = self.blocks.register(own, block_hash, parent)
            request.num_registered_blocks = index + 1
            if parent == own:
                new.append(block_hash)
        return new
