"""The scheduler: which tokens of which requests a step computes.

The order within a step is fixed: decoding requests, one token each; then the request
whose prompt was cut in an earlier step; then the queue, in order of arrival. At most
one prompt is cut in a step. A request reserves the blocks of its whole prompt when it
is admitted, so only decoding can run out of them; then the request admitted last is
*preempted*: it gives everything back, and will be computed anew, from what the cache
still holds, when its turn comes again.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from lockstep.blocks import BlockHash
from lockstep.config import Sizes
from lockstep.errors import PlanError
from lockstep.plan import RowKind, RowPlan, StepPlan
from lockstep.policy import slice_end
from lockstep.request import Request, RequestState

from .prefix_cache import PrefixCache


class Scheduler:
    """Owns the queue and the running requests.

    Attributes:
        waiting: Requests without memory, in order of arrival.
        running: Requests with blocks and a live slot, in order of admission.
        suspect: The request being planned; who is to blame if planning fails.
        solo: Requests that must run alone, since a step with them failed, each with
            the position that it reached there.
        step: Steps planned so far.
        admissions: Admissions so far.
    """

    def __init__(self, sizes: Sizes, cache: Any) -> None:
        """Start without requests.

        Args:
            sizes: The engine's sizes.
            cache: Owner of all memory, of either side.
        """
        self.sizes = sizes
        self.cache: PrefixCache = cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.suspect: Request | None = None
        self.solo: list[tuple[Request, int]] = []
        self.step = 0
        self.admissions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Put a request into the queue, at the place its arrival gives it."""
        request.state = RequestState.WAITING
        insort(self.waiting, request, key=lambda waiting: waiting.arrival)

    def remove(self, request: Request) -> None:
        """Take a request out, in whatever phase it is, with all it holds."""
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.solo = [pair for pair in self.solo if pair[0] is not request]
        request.state = RequestState.FINISHED

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue; it keeps only its tokens."""
        self.running.remove(request)
        self.cache.release(request)
        self.add(request)

    def plan(self, recorded: StepPlan | None = None) -> StepPlan:
        """Decide the rows of the next step and reserve all memory they need.

        Args:
            recorded: A plan to replay: the same rows with the same tokens. Block and
                slot ids follow from this engine's own pools.

        Raises:
            PlanError: The recorded plan cannot be replayed here.
        """
        self.step += 1
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
        """Publish what a plan's rows have computed.

        Returns:
            Hashes of the blocks that entered the cache, and of those whose state did.
        """
        registered: list[BlockHash] = []
        stored: list[BlockHash] = []
        for row in plan.rows:
            self.suspect = request = self.find(row.request_id)
            blocks, states = self.cache.commit(request, row)
            registered += blocks
            stored += states
            request.num_computed = row.end
        self.suspect = None
        return registered, stored

    def roll_back(self) -> list[Request]:
        """Undo a step that failed: every running request returns to the queue.

        All of them, since the states in live slots may be half written; what was
        published before stays cached and is all that a request needs to catch up.

        Returns:
            The requests sent back, in order of admission.
        """
        self.cache.cancel_reservations()
        sent_back = list(self.running)
        for request in reversed(sent_back):
            self.preempt(request)
        return sent_back

    def run_alone(self, plan: StepPlan) -> None:
        """Run each request of a failed plan in steps of its own, to find the fault."""
        ends = {row.request_id: row.end for row in plan.rows}
        # Some may have finished in the step.
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
        """Let requests run with others again that got past where a step had failed.

        One step alone is not enough: it may end before the token at fault.
        """
        self.solo = [(r, end) for r, end in self.solo if r.num_computed < end]

    def find(self, request_id: str) -> Request:
        """Find an unfinished request.

        Raises:
            PlanError: There is none of that name.
        """
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                return request
        raise PlanError(f"no unfinished request is named {request_id!r}")

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Give each decoding request a token, those that waited longest first."""
        decoding = [r for r in self.running if r.state is RequestState.DECODE]
        decoding.sort(key=lambda request: (request.last_step, request.admission))
        chosen = decoding[: self.sizes.max_tokens_per_step]
        # In order of admission the victim of a preemption is never a planned row.
        for request in sorted(chosen, key=lambda request: request.admission):
            if request in self.running and self._make_room(request, plan):
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
            if request.state is RequestState.PREFILL and self._budget(plan):
                self.suspect = request
                plan.rows.append(self._prefill_row(request, plan))

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit from the queue until something runs out or a prompt is cut."""
        for request in list(self.waiting):
            self.suspect = request
            plan.blocked = self._why_blocked(plan)
            if plan.blocked:
                return
            if self.cache.first_missing(request) in self._hashes_in_progress():
                plan.deferred.append(request.request_id)
            elif not self._admit(request, plan):
                plan.blocked = f"too few blocks for request {request.request_id!r}"
                return

    def _plan_solo(self, plan: StepPlan) -> None:
        """Run one suspicious request alone."""
        request, _ = self.solo[0]
        self.suspect = request
        if request in self.waiting:
            while not self._admit(request, plan):
                self._preempt_last(plan)
        elif request.state is RequestState.PREFILL:
            plan.rows.append(self._prefill_row(request, plan))
        elif self._make_room(request, plan):
            plan.rows.append(self._decode_row(request, plan))

    def _why_blocked(self, plan: StepPlan) -> str:
        """Say what keeps the queue from moving in this step; empty if nothing does."""
        if plan.preempted:
            return "a request was preempted: there are too few blocks"
        if self._has_cut(plan):
            return "a prompt was cut; its rest comes first"
        if len(self.running) == self.sizes.max_requests:
            return f"max_requests ({self.sizes.max_requests}) are running"
        if not self._budget(plan):
            return f"max_tokens_per_step ({self.sizes.max_tokens_per_step}) is used up"
        return ""

    def _has_cut(self, plan: StepPlan) -> bool:
        """Say whether a running prompt will be unfinished after this step."""
        ends = {row.request_id: row.end for row in plan.rows}
        return any(
            ends.get(request.request_id, request.num_computed) < request.prefill_end
            for request in self.running
            if request.state is RequestState.PREFILL
        )

    def _hashes_in_progress(self) -> set[BlockHash]:
        """Hash the blocks that running prefills are about to complete."""
        size = self.sizes.block_size
        return {
            block_hash
            for request in self.running
            if request.state is RequestState.PREFILL
            for block_hash in request.hashes[
                request.num_registered_blocks : request.prefill_end // size
            ]
        }

    def _admit(
        self, request: Request, plan: StepPlan, recorded: RowPlan | None = None
    ) -> bool:
        """Move a request from the queue to the running ones, if its memory can be had.

        It takes part in this step already, with the first slice of its prompt.

        Args:
            request: A waiting request.
            plan: Takes its row, and what was evicted for it.
            recorded: Its row in a plan to replay, which fixes skip and slice.

        Returns:
            Whether it was admitted; if not, nothing has changed.
        """
        self.suspect = request
        skip = None if recorded is None else recorded.start
        if not self.cache.admit(request, plan, skip):
            return False
        self.admissions += 1
        request.admission = self.admissions
        request.state = RequestState.PREFILL
        self.waiting.remove(request)
        self.running.append(request)
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
        """Plan the next slice of a prompt, and the states to keep within it.

        The slice that reaches the end of the prompt gives the next token.
        """
        start, length = request.num_computed, request.prefill_end
        if end is None:
            budget = self._budget(plan)
            end = slice_end(start, length, budget, self.sizes.block_size)
        row = self._row(request, RowKind.PREFILL, end, samples=end == length)
        row.snapshots = self.cache.reserve_prefill_snapshots(request, start, end, plan)
        return row

    def _row(self, request: Request, kind: RowKind, end: int, samples: bool) -> RowPlan:
        """Write down what a request needs and holds for its next tokens."""
        assert request.slot_id is not None
        return RowPlan(
            request_id=request.request_id,
            kind=kind,
            start=request.num_computed,
            end=end,
            samples=samples,
            slot_id=request.slot_id,
            initial_slot_id=request.initial_slot_id,
            block_table=list(request.block_table),
            num_shared_blocks=request.num_shared_blocks,
        )

    def _budget(self, plan: StepPlan) -> int:
        """Count the tokens that this step may still compute."""
        return self.sizes.max_tokens_per_step - plan.shape.tokens

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
        """Replay one row; refuse it if this engine cannot do just the same.

        Args:
            row: The recorded row.
            plan: Takes the row as it is here, with this engine's blocks and slots.
            victims: Requests that the recorded step preempted and that still run here.
        """
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
        if request in self.waiting:
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
        if request not in self.running:
            raise PlanError(f"{request_id!r} cannot be preempted: it is not running")
        if any(row.request_id == request_id for row in plan.rows):
            raise PlanError(f"{request_id!r} cannot be preempted: it has a row")
        self.preempt(request)
        plan.preempted.append(request_id)
