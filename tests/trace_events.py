"""Rare events, recognised from the records of steps.

A fault often needs two rare things at once. Each is named here, and the random traces
count how often they met it, so that a search that stopped reaching one fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.blocks import align_down
from lockstep.plan import RowKind, RowPlan
from lockstep.trace import StepRecord

from .cache_model import Expected

#: What every run of the random traces must meet.
EVENTS = (
    "evicted block owned a snapshot",
    "restore and extraction in one step",
    "preemption mid-prompt",
    "preemption in decode",
    "abort while a restore is pending",
    "two rows want one snapshot",
    "pool exactly full with a partial hit",
    "row moved in a snapshot step",
    "deferred request loses its donor",
    "state evicted, K/V kept",
    "skip held back by a missing state",
    "shared block computed again beside its reader",
    "twin of a cached block",
    "whole prompt cached",
    "resumed from the cache",
    "decode snapshot",
    "decode restored by a second turn",
)
#: Phases in which a row that starts from a snapshot has not finished reading it.
BEFORE_COMMIT = ("admit", "prepare", "forward", "commit")


class Watcher:
    """Follows the records of one engine and counts the named events."""

    def __init__(self, block_size: int, num_blocks: int, max_requests: int) -> None:
        """Begin before the first step.

        Args:
            block_size: Tokens in a block.
            num_blocks: Blocks in the pool.
            max_requests: Live slots; snapshots come after them.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_requests = max_requests
        self.counts: Counter[str] = Counter()
        self.tokens: dict[str, list[int]] = {}
        self.last_rows: dict[str, RowPlan] = {}
        self.places: dict[str, int] = {}
        self.donors: dict[str, set[str]] = {}
        self.aborts_within: list[tuple[str, str]] = []
        self.decode_states: set[bytes] = set()
        self.preempted: set[str] = set()

    def arrive(self, request_id: str, prompt: Sequence[int]) -> None:
        """Note a request that enters the queue."""
        self.tokens[request_id] = list(prompt)

    def abort_within(self, request_id: str, phase: str) -> None:
        """Note an abort that is called in the step whose record comes next."""
        self.aborts_within.append((request_id, phase))

    def abort_between(self, request_id: str) -> None:
        """Note an abort between two steps."""
        self._lose_donor(request_id)
        self._forget(request_id)

    def note(self, record: StepRecord, expected: Expected) -> None:
        """Take in a step.

        Args:
            record: What it did.
            expected: What the cache model adds: wishes and twins that left no trace.
        """
        self._see_evictions(record)
        self._see_preemptions(record)
        self._see_restores(record)
        self._see_full_pool(record)
        self._see_moves(record)
        self._see_deferrals(record)
        self._see_decodes(record)
        self.counts["two rows want one snapshot"] += len(expected.shared_wishes)
        self.counts["twin of a cached block"] += len(expected.twins)
        self._remember(record)

    def _see_evictions(self, record: StepRecord) -> None:
        blocks = set(record.plan.evicted_blocks)
        states = set(record.plan.evicted_states)
        self.counts["evicted block owned a snapshot"] += len(blocks & states)
        self.counts["state evicted, K/V kept"] += len(states - blocks)

    def _see_preemptions(self, record: StepRecord) -> None:
        came = {row.request_id for row in record.rows if row.cache is not None}
        for request_id in record.plan.preempted:
            row = self.last_rows.get(request_id)
            if row is not None:
                mid = "mid-prompt" if not row.samples else "in decode"
                self.counts[f"preemption {mid}"] += 1
            self.counts["preempted and admitted in one step"] += request_id in came
            self.preempted.add(request_id)

    def _restores(self, row: RowPlan) -> bool:
        return (
            row.cache is not None
            and row.initial_slot_id >= self.max_requests
            and (row.start > 0)
        )

    def _see_restores(self, record: StepRecord) -> None:
        restored = [row for row in record.rows if self._restores(row)]
        if restored and any(row.snapshots for row in record.rows):
            self.counts["restore and extraction in one step"] += 1
        for row in restored:
            pending = [p for name, p in self.aborts_within if name == row.request_id]
            if row.request_id in record.aborted and set(pending) & set(BEFORE_COMMIT):
                self.counts["abort while a restore is pending"] += 1
            self.counts["resumed from the cache"] += row.request_id in self.preempted
            key = self._hash_at_start(row)
            self.counts["decode restored by a second turn"] += key in self.decode_states
        readers = [row for row in record.rows if row.num_shared_blocks]
        for row in record.rows:
            if row.cache is None:
                continue
            report = row.cache
            again = row.block_table[
                row.start // self.block_size : row.num_shared_blocks
            ]
            others = {
                block
                for other in readers
                if other is not row
                for block in other.block_table[: other.num_shared_blocks]
            }
            others |= {
                block
                for other in record.rows
                if other is not row and other.kind is RowKind.DECODE
                for block in other.block_table
            }
            self.counts["shared block computed again beside its reader"] += bool(
                set(again) & others
            )
            held_back = report.matched_kv_tokens > report.matched_state_tokens
            self.counts["skip held back by a missing state"] += held_back
            length = len(self.tokens[row.request_id])
            self.counts["whole prompt cached"] += report.matched_kv_tokens == length

    def _hash_at_start(self, row: RowPlan) -> bytes:
        return repr(self.tokens[row.request_id][: row.start]).encode()

    def _see_full_pool(self, record: StepRecord) -> None:
        """See an admission that takes the last block, next to its own idle match."""
        held = {
            name: row.block_table
            for name, row in self.last_rows.items()
            if name not in record.plan.preempted
        }
        for row in record.rows:
            before = {block for table in held.values() for block in table}
            held[row.request_id] = row.block_table
            after = before | set(row.block_table)
            shared = set(row.block_table[: row.num_shared_blocks])
            partial = 0 < row.num_shared_blocks < len(row.block_table)
            idle = bool(shared - before)
            if row.cache and partial and idle and len(after) == self.num_blocks:
                self.counts["pool exactly full with a partial hit"] += 1

    def _see_moves(self, record: StepRecord) -> None:
        """See a row that changes its place right after its state was stored."""
        for place, row in enumerate(record.rows):
            was = self.places.get(row.request_id)
            if was is not None and was != place:
                self.counts["row moved in a snapshot step"] += 1
        ended = {output.request_id for output in record.finished}
        self.places = {
            row.request_id: place
            for place, row in enumerate(record.rows)
            if row.snapshots
            and any(before.request_id in ended for before in record.rows[:place])
        }

    def _see_deferrals(self, record: StepRecord) -> None:
        self.donors = {
            waiting: {
                row.request_id
                for row in record.plan.prefill_rows
                if self._computes_for(row, waiting)
            }
            for waiting in record.plan.deferred
        }
        for request_id in record.aborted:
            self._lose_donor(request_id)

    def _computes_for(self, row: RowPlan, waiting: str) -> bool:
        mine, theirs = self.tokens[row.request_id], self.tokens[waiting]
        common = 0
        while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
            common += 1
        return align_down(common, self.block_size) > row.start

    def _lose_donor(self, request_id: str) -> None:
        for donors in self.donors.values():
            self.counts["deferred request loses its donor"] += request_id in donors
        self.donors.pop(request_id, None)

    def _see_decodes(self, record: StepRecord) -> None:
        for row in record.plan.decode_rows:
            self.counts["decode snapshot"] += len(row.snapshots)
            if row.snapshots:
                tokens = self.tokens[row.request_id][: row.end]
                self.decode_states.add(repr(tokens).encode())

    def _remember(self, record: StepRecord) -> None:
        for request_id in record.plan.preempted:
            self.last_rows.pop(request_id, None)
        for row in record.rows:
            self.last_rows[row.request_id] = row
        for request_id, token in record.tokens.items():
            self.tokens[request_id].append(token)
        for output in record.finished:
            self._forget(output.request_id)
        self.aborts_within.clear()

    def _forget(self, request_id: str) -> None:
        self.last_rows.pop(request_id, None)
        self.places.pop(request_id, None)
