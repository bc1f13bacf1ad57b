"""The scheduler, whose steps cost what their rows cost, however many requests wait.

Both lists are sorted, the queue by arrival and the running requests by admission, so
that a request is found by bisection, and by its name in a dictionary. A step counts its
tokens as it goes, looks at the queue only as far as it admits or defers, and copies a
block table only where it may have changed since the request's last row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Any

from lockstep.blocks import BlockHash
from lockstep.config import Sizes
from lockstep.errors import PlanError
from lockstep.plan import RowKind, RowPlan, StepPlan
from lockstep.policy import slice_end
from lockstep.request import Request, RequestState

from .prefix_cache import PrefixCache

_arrival = attrgetter("arrival")
_admission = attrgetter("admission")


class Scheduler:
    """The same plans as the reference's."""

    def __init__(self, sizes: Sizes, cache: Any) -> None:
        """Start without requests."""
        self.sizes = sizes
        self.cache: PrefixCache = cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.suspect: Request | None = None
        self.solo: list[tuple[Request, int]] = []
        self.step = 0
        self.admissions = 0
        self._budget = 0
        self._lists = self.waiting, self.running
        self._names: dict[str, Request] = {}
        self._tables: dict[str, list[int]] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Put a request into the queue, at the place its arrival gives it."""
        request.state = RequestState.WAITING
        insort(self.waiting, request, key=_arrival)
        self._by_name()[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take a request out, in whatever phase it is, with all it holds."""
        if self._by_name().get(request.request_id) is request:
            is_running = request.state is not RequestState.WAITING
            self._take_out(request)
            if is_running:
                self.cache.release(request)
        if self.solo:
            self.solo = [pair for pair in self.solo if pair[0] is not request]
        request.state = RequestState.FINISHED

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue; it keeps only its tokens."""
        self._take_out(request)
        self.cache.release(request)
        self.add(request)

    def plan(self, recorded: StepPlan | None = None) -> StepPlan:
        """Decide the rows of the next step and reserve all memory they need.

        Cost: one pass over the running requests, and what the step admits or defers.
        """
        self._by_name()
        self.step += 1
        self._budget = self.sizes.max_tokens_per_step
        plan = StepPlan()
        if recorded is not None:
            self._follow(recorded, plan)
        elif self.solo:
            self._plan_solo(plan)
        else:
            self._plan_decodes(plan)
            self._plan_continuing(plan)
            self._plan_waiting(plan)
        self.suspect = None
        for row in plan.rows:
            self.find(row.request_id).last_step = self.step
        return plan

    def commit(self, plan: StepPlan) -> tuple[list[BlockHash], list[BlockHash]]:
        """Publish what a plan's rows have computed."""
        registered: list[BlockHash] = []
        stored: list[BlockHash] = []
        for row in plan.rows:
            self.suspect = request = self.find(row.request_id)
            before = request.num_registered_blocks
            blocks, states = self.cache.commit(request, row)
            registered += blocks
            stored += states
            request.num_computed = row.end
            if request.num_registered_blocks > before:
                # A block may have been replaced by its twin.
                self._tables.pop(request.request_id, None)
        self.suspect = None
        return registered, stored

    def roll_back(self) -> list[Request]:
        """Undo a step that failed: every running request returns to the queue."""
        self.cache.cancel_reservations()
        sent_back = list(self.running)
        for request in reversed(sent_back):
            self.preempt(request)
        return sent_back

    def run_alone(self, plan: StepPlan) -> None:
        """Run each request of a failed plan in steps of its own, to find the fault."""
        ends = {row.request_id: row.end for row in plan.rows}
        self.solo = [
            (request, ends[request.request_id])
            for request in (*self.running, *self.waiting)
            if request.request_id in ends
        ]

    def ran_alone(self, plan: StepPlan) -> Request | None:
        """Return the request that a plan ran alone since a step with it had failed."""
        if not self.solo:
            return None
        request, _ = self.solo[0]
        ids = [row.request_id for row in plan.rows]
        return request if ids == [request.request_id] else None

    def clear_suspicion(self) -> None:
        """Let requests run with others again that got past where a step had failed."""
        if self.solo:
            self.solo = [(r, end) for r, end in self.solo if r.num_computed < end]

    def find(self, request_id: str) -> Request:
        """Find an unfinished request: one look-up."""
        request = self._by_name().get(request_id)
        if request is None:
            raise PlanError(f"no unfinished request is named {request_id!r}")
        return request

    def _by_name(self) -> dict[str, Request]:
        """Return requests by name, gathered anew where a list was replaced outside."""
        if self.waiting is not self._lists[0] or self.running is not self._lists[1]:
            self._lists = self.waiting, self.running
            everyone = (*self.waiting, *self.running)
            self._names = {request.request_id: request for request in everyone}
            self._tables.clear()
        return self._names

    def _take_out(self, request: Request) -> None:
        """Take a request off its list, which is sorted: bisection and one move."""
        del self._by_name()[request.request_id]
        self._tables.pop(request.request_id, None)
        is_waiting = request.state is RequestState.WAITING
        requests, key = (
            (self.waiting, _arrival) if is_waiting else (self.running, _admission)
        )
        index = bisect_left(requests, key(request), key=key)
        # Several may have one number; few do.
        while requests[index] is not request:
            index += 1
        del requests[index]

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Give each decoding request a token; sorts only where some must wait.

        Requests run in order of admission, in which rows come as well.
        """
        chosen = [r for r in self.running if r.state is RequestState.DECODE]
        if len(chosen) > self._budget:
            chosen.sort(key=lambda request: (request.last_step, request.admission))
            chosen = sorted(chosen[: self._budget], key=_admission)
        for request in chosen:
            # A preempted one waits.
            if request.state is RequestState.DECODE and self._make_room(request, plan):
                plan.rows.append(self._decode_row(request, plan))

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Find a block for the next token; preempts until there is one."""
        self.suspect = request
        while not self.cache.grow(request, plan):
            if self._preempt_last(plan) is request:
                return False
        return True

    def _preempt_last(self, plan: StepPlan) -> Request:
        """Preempt the request that was admitted last."""
        victim = self.running[-1]
        self.preempt(victim)
        plan.preempted.append(victim.request_id)
        return victim

    def _plan_continuing(self, plan: StepPlan) -> None:
        """Go on with the prompt that was cut, if one was."""
        for request in self.running:
            if request.state is RequestState.PREFILL and self._budget:
                self.suspect = request
                plan.rows.append(self._prefill_row(request, plan))

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit from the queue until something runs out or a prompt is cut.

        Hashes in progress are gathered once, when they are first asked for: after the
        slices of long prompts nothing is admitted, so nothing asks.
        """
        is_cut, place = self._has_cut(plan), 0
        in_progress: set[BlockHash] | None = None
        while place < len(self.waiting):
            request = self.suspect = self.waiting[place]
            plan.blocked = self._why_blocked(plan, is_cut)
            if plan.blocked:
                return
            if in_progress is None:
                in_progress = self._hashes_in_progress()
            if self.cache.first_missing(request) in in_progress:
                plan.deferred.append(request.request_id)
                place += 1
            elif not self._admit(request, plan):
                plan.blocked = f"too few blocks for request {request.request_id!r}"
                return
            else:
                is_cut = plan.rows[-1].end < request.prefill_end
                in_progress.update(self._hashes_to_come(request))

    def _plan_solo(self, plan: StepPlan) -> None:
        """Run one suspicious request alone."""
        request, _ = self.solo[0]
        self.suspect = request
        if request.state is RequestState.WAITING:
            while not self._admit(request, plan):
                self._preempt_last(plan)
        elif request.state is RequestState.PREFILL:
            plan.rows.append(self._prefill_row(request, plan))
        elif self._make_room(request, plan):
            plan.rows.append(self._decode_row(request, plan))

    def _why_blocked(self, plan: StepPlan, is_cut: bool) -> str:
        """Say what keeps the queue from moving in this step; empty if nothing does."""
        if plan.preempted:
            return "a request was preempted: there are too few blocks"
        if is_cut:
            return "a prompt was cut; its rest comes first"
        if len(self.running) == self.sizes.max_requests:
            return f"max_requests ({self.sizes.max_requests}) are running"
        if not self._budget:
            return f"max_tokens_per_step ({self.sizes.max_tokens_per_step}) is used up"
        return ""

    def _has_cut(self, plan: StepPlan) -> bool:
        """Say whether a running prompt will be unfinished after this step."""
        ends = {row.request_id: row.end for row in plan.prefill_rows}
        return any(
            ends.get(request.request_id, request.num_computed) < request.prefill_end
            for request in self.running
            if request.state is RequestState.PREFILL
        )

    def _hashes_in_progress(self) -> set[BlockHash]:
        """Hash the blocks that running prefills are about to complete."""
        prefills = [r for r in self.running if r.state is RequestState.PREFILL]
        return {key for request in prefills for key in self._hashes_to_come(request)}

    def _hashes_to_come(self, request: Request) -> list[BlockHash]:
        """List the hashes of a prompt's blocks that are not known to the cache."""
        last = request.prefill_end // self.sizes.block_size
        return request.hashes[request.num_registered_blocks : last]

    def _admit(
        self, request: Request, plan: StepPlan, recorded: RowPlan | None = None
    ) -> bool:
        """Move a request from the queue to the running ones, with its first slice."""
        self.suspect = request
        skip = None if recorded is None else recorded.start
        if not self.cache.admit(request, plan, skip):
            return False
        self.admissions += 1
        self._take_out(request)
        request.admission = self.admissions
        request.state = RequestState.PREFILL
        self.running.append(request)
        self._by_name()[request.request_id] = request
        end = None if recorded is None else recorded.end
        row = self._prefill_row(request, plan, end)
        row.cache = request.admission_report
        if request.cache is None:
            request.cache = request.admission_report
            request.timings.note_admission()
        plan.rows.append(row)
        return True

    def _decode_row(self, request: Request, plan: StepPlan) -> RowPlan:
        """Plan one new token, and keep the state if that completes a block."""
        end = request.num_computed + 1
        snapshots = self.cache.reserve_decode_snapshot(request, end, plan)
        row = self._row(request, RowKind.DECODE, end, samples=True)
        row.snapshots = snapshots
        return row

    def _prefill_row(
        self, request: Request, plan: StepPlan, end: int | None = None
    ) -> RowPlan:
        """Plan the next slice of a prompt, and the states to keep within it."""
        start, length = request.num_computed, request.prefill_end
        if end is None:
            end = slice_end(start, length, self._budget, self.sizes.block_size)
        row = self._row(request, RowKind.PREFILL, end, samples=end == length)
        row.snapshots = self.cache.reserve_prefill_snapshots(request, start, end, plan)
        return row

    def _row(self, request: Request, kind: RowKind, end: int, samples: bool) -> RowPlan:
        """Write down what a request needs and holds for its next tokens."""
        assert request.slot_id is not None
        self._budget -= end - request.num_computed
        return RowPlan(
            request_id=request.request_id,
            kind=kind,
            start=request.num_computed,
            end=end,
            samples=samples,
            slot_id=request.slot_id,
            initial_slot_id=request.initial_slot_id,
            block_table=self._table(request),
            num_shared_blocks=request.num_shared_blocks,
        )

    def _table(self, request: Request) -> list[int]:
        """Copy a block table, or give the copy of an earlier row that is still true.

        A table grows, which its length tells, or changes where `commit` registers.
        """
        table = self._tables.get(request.request_id, [])
        if len(table) != len(request.block_table):
            table = self._tables[request.request_id] = list(request.block_table)
        return table

    def _follow(self, recorded: StepPlan, plan: StepPlan) -> None:
        """Replay the decisions of a recorded plan, row by row."""
        tokens, most = recorded.shape.tokens, self.sizes.max_tokens_per_step
        if tokens > most:
            raise PlanError(f"the plan computes {tokens} tokens; a step may {most}")
        if len({row.request_id for row in recorded.rows}) < len(recorded.rows):
            raise PlanError("the plan has two rows of one request")
        plan.deferred = list(recorded.deferred)
        plan.blocked = recorded.blocked
        # Each at the moment when a block was missing, so that the same is evicted.
        victims = list(recorded.preempted)
        for row in recorded.decode_rows:
            self._follow_row(row, plan, victims)
        while victims:
            self._preempt_next(victims, plan)
        for row in recorded.prefill_rows:
            self._follow_row(row, plan, victims)

    def _follow_row(self, row: RowPlan, plan: StepPlan, victims: list[str]) -> None:
        """Replay one row; refuse it if this engine cannot do just the same."""
        request = self.suspect = self.find(row.request_id)
        length = len(request.token_ids)
        if not row.start < row.end <= length:
            raise PlanError(
                f"the plan computes tokens {row.start} to {row.end} of "
                f"{row.request_id!r}, which has {length}"
            )
        decodes = request.state is RequestState.DECODE
        if decodes is not (row.kind is RowKind.DECODE):
            raise PlanError(f"{row.request_id!r} has no {row.kind} row to come")
        if request.state is RequestState.WAITING:
            if not self._admit(request, plan, row):
                raise PlanError(
                    f"no blocks or slot are left to admit {row.request_id!r}"
                )
            return
        if row.start != request.num_computed:
            raise PlanError(
                f"the plan computes tokens {row.start} to {row.end} of "
                f"{row.request_id!r}, which stands at {request.num_computed}"
            )
        if row.kind is RowKind.PREFILL:
            plan.rows.append(self._prefill_row(request, plan, row.end))
            return
        while not self.cache.grow(request, plan):
            if not victims:
                raise PlanError(f"no block is left for {row.request_id!r} to decode")
            self._preempt_next(victims, plan)
        plan.rows.append(self._decode_row(request, plan))

    def _preempt_next(self, victims: list[str], plan: StepPlan) -> None:
        """Preempt the first of the requests that a recorded plan preempts."""
        request_id = victims.pop(0)
        request = self.find(request_id)
        if request.state is RequestState.WAITING:
            raise PlanError(f"{request_id!r} cannot be preempted: it is not running")
        if any(row.request_id == request_id for row in plan.rows):
            raise PlanError(f"{request_id!r} cannot be preempted: it has a row")
        self.preempt(request)
        plan.preempted.append(request_id)
