"""The prefix cache: what of a prompt is known already, and what to keep for the next.

K/V blocks of a prefix can be shared by any request that begins with the same tokens. A
Mamba state is good for exactly one position. So a prefix is skipped up to a position at
which both are known: every block before it, and a state right there. This module joins
the two pools: it matches, reserves both kinds of memory together or not at all, and
publishes what a step has computed.
"""

from __future__ import annotations

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
    """What the cache holds of a token list.

    Attributes:
        block_ids: Blocks of its beginning, as far as they go without a gap.
        state_positions: Positions within that at which a state is stored.
    """

    block_ids: list[int]
    state_positions: list[int]


class PrefixCache:
    """Joins block pool and state slots; the only caller of both."""

    def __init__(
        self,
        blocks: Any,
        slots: Any,
        sizes: Sizes,
        needs_state: bool,
        enabled: bool,
    ) -> None:
        """Begin empty.

        Args:
            blocks: The block pool, of either side.
            slots: The state slots, of either side.
            sizes: The engine's sizes.
            needs_state: Whether the model has Mamba layers.
            enabled: Whether anything is matched or kept.
        """
        self.blocks: BlockPool = blocks
        self.slots: StateSlots = slots
        self.sizes = sizes
        self.needs_state = needs_state
        self.enabled = enabled

    def match(self, request: Request) -> Match:
        """Look up a request's tokens; changes nothing."""
        if not self.enabled:
            return Match([], [])
        request.update_hashes(self.sizes.block_size)
        block_ids = self.blocks.match(request.hashes)
        states = [
            (index + 1) * self.sizes.block_size
            for index in range(len(block_ids))
            if self.slots.lookup(request.hashes[index]) is not None
        ]
        return Match(block_ids, states)

    def first_missing(self, request: Request) -> BlockHash | None:
        """Return the hash of the first full block that is not cached, if any."""
        found = len(self.match(request).block_ids)
        return request.hashes[found] if found < len(request.hashes) else None

    def admit(self, request: Request, plan: StepPlan, skip: int | None = None) -> bool:
        """Reserve all that a request needs for its whole prompt, or nothing.

        The match is pinned before anything is allocated: allocation may evict, and
        must not evict what was just found.

        Args:
            request: A waiting request; on success it has blocks, a live slot, a slot to
                start from and its first position to compute.
            plan: Takes note of what was evicted.
            skip: Tokens to skip when a recorded plan is replayed.

        Returns:
            Whether the blocks and a live slot could be had.
        """
        if not self.slots.num_free_live:
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
        """Make room for one more token; says whether there is."""
        missing = num_blocks_for(request.num_computed + 1, self.sizes.block_size)
        missing -= len(request.block_table)
        try:
            request.block_table += self._allocate(max(0, missing), plan)
        except OutOfBlocksError:
            return False
        return True

    def reserve_prefill_snapshots(
        self, request: Request, start: int, end: int, plan: StepPlan
    ) -> list[SnapshotPlan]:
        """Reserve slots for the states that a prefill slice should leave behind.

        Points come best first, so that the best get the slots there are.
        """
        points = snapshot_points(
            start, end, request.prefill_end, request.branch, self.sizes.block_size
        )
        found = [self._reserve(request, point, plan) for point in points]
        kept = [snapshot for snapshot in found if snapshot is not None]
        return sorted(kept, key=lambda snapshot: snapshot.position)

    def reserve_decode_snapshot(
        self, request: Request, end: int, plan: StepPlan
    ) -> list[SnapshotPlan]:
        """Reserve a slot for the state at a block boundary reached in decode.

        A request keeps one such state, its latest: the next turn of a chat starts from
        there. The one before gives its slot back first.
        """
        if end % self.sizes.block_size or not self._keeps_states():
            return []
        if request.decode_snapshot is not None:
            self.slots.replace(request.decode_snapshot)
        request.update_hashes(self.sizes.block_size)
        snapshot = self._reserve(request, end, plan, replaceable=True)
        request.decode_snapshot = snapshot and snapshot.block_hash
        return [] if snapshot is None else [snapshot]

    def commit(self, request: Request, row: RowPlan) -> tuple[list[BlockHash], ...]:
        """Publish what a row has computed: full blocks first, then states on them.

        Only called after the forward pass, so that nothing is found in the cache that
        was not computed.

        Returns:
            Hashes of the blocks that entered the cache, and of those whose state did.
        """
        registered: list[BlockHash] = []
        if self.enabled:
            registered = self._register(request, row.end)
        for snapshot in row.snapshots:
            self.slots.publish(snapshot.block_hash)
        self.finish_restore(request)
        return registered, [snapshot.block_hash for snapshot in row.snapshots]

    def finish_restore(self, request: Request) -> None:
        """Let go of the snapshot that a row started from; its live slot is next."""
        assert request.slot_id is not None
        first, zero = self.sizes.first_snapshot_slot, self.sizes.zero_slot
        if first <= request.initial_slot_id < zero:
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

    def _report(
        self, request: Request, match: Match, forced: int | None
    ) -> CacheReport:
        """Decide what to skip, or check what a recorded plan skipped.

        A replay may skip less than this cache could, but only to a position from which
        this engine can go on.
        """
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

    def _keeps_states(self) -> bool:
        """Say whether states are worth storing in this engine."""
        return self.enabled and self.needs_state

    def _allocate(self, count: int, plan: StepPlan) -> list[int]:
        """Take blocks; whatever is evicted for them takes its state along.

        A state is of no use without the K/V before it.
        """
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
        if not self._keeps_states():
            return None
        block_hash = request.hashes[position // self.sizes.block_size - 1]
        reservation = self.slots.reserve(block_hash, replaceable)
        if reservation is None:
            return None
        if reservation.evicted is not None:
            plan.evicted_states.append(reservation.evicted)
        return SnapshotPlan(position, reservation.slot_id, block_hash)

    def _register(self, request: Request, end: int) -> list[BlockHash]:
        """Make the blocks known that are complete at ``end``, in order.

        Where another request has computed the same tokens in the meantime, its block
        takes the place of this one's.

        Returns:
            Hashes that were not known before.
        """
        request.update_hashes(self.sizes.block_size)
        table, new = request.block_table, list[BlockHash]()
        for index in range(request.num_registered_blocks, end // self.sizes.block_size):
            own, block_hash = table[index], request.hashes[index]
            parent = table[index - 1] if index else None
            table[index] = self.blocks.register(own, block_hash, parent)
            request.num_registered_blocks = index + 1
            new += [block_hash] if table[index] == own else []
        return new
