"""An engine's bookkeeping without the engine: no tensors, so many steps in little time.

`Books` takes requests and steps like an engine, with a formula in the place of the
model. Faults can be thrown in any phase and within the pools. `random_trace` draws what
happens, and `act` does it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import Sizes
from lockstep.errors import LockstepError, PlanError
from lockstep.plan import RowKind, StepPlan
from lockstep.request import FinishReason, Request, RequestState, SamplingParams
from lockstep.state import BlockPoolState, StateSlotsState
from lockstep.trace import StepRecord
from tests.factories import load

BLOCK = 4
#: Calls and phases in which a fault can be thrown.
FAULTS = (
    *("plan", "first_missing", "allocate", "reserve", "forward", "register"),
    *("publish", "sample", "update"),
)
#: How a recorded plan is spoilt before it is replayed; the first leaves it as it is.
CHANGES = (
    *("nothing", "nothing", "drops a row", "ends early", "ends late", "starts early"),
    *("starts late", "names nobody", "repeats a row", "flips a kind", "reverses rows"),
    *("preempts more", "preempts nobody", "preempts a waiting one", "too many tokens"),
)


class Fault(Exception):
    """Thrown on purpose."""


@dataclass(frozen=True)
class Setting:
    """Sizes and options; small, so that everything runs out."""

    max_requests: int = 3
    max_tokens_per_step: int = 16
    num_blocks: int = 10
    snapshot_slots: int = 3
    eviction: str = "lru"
    needs_state: bool = True
    enabled: bool = True

    @property
    def sizes(self) -> Sizes:
        """The same as an engine has it."""
        return Sizes(
            max_requests=self.max_requests,
            max_tokens_per_step=self.max_tokens_per_step,
            max_length=1000,
            block_size=BLOCK,
            scan_chunk_size=BLOCK,
            num_blocks=self.num_blocks,
            snapshot_slots=self.snapshot_slots,
            bytes_per_block=1,
            bytes_per_slot=1,
        )


@dataclass
class State:
    """All that the bookkeeping knows between two steps, in plain form."""

    step: int
    admissions: int
    waiting: list[Request]
    running: list[Request]
    solo: list[tuple[str, int]]
    blocks: BlockPoolState
    slots: StateSlotsState


class Trap:
    """Throws a fault at some call to come."""

    def __init__(self) -> None:
        """Begin without one."""
        self.name, self.skip = "", 0

    def arm(self, name: str, skip: int) -> None:
        """Throw at a call of this name, after some that go well."""
        self.name, self.skip = name, skip

    def pass_by(self, name: str) -> None:
        """Throw, if it is time."""
        if name == self.name:
            self.skip -= 1
            if self.skip < 0:
                self.name = ""
                raise Fault(name)


#: The name of what happens, and its arguments.
Action = tuple[Any, ...]


@dataclass
class Books:
    """Scheduler, cache and pools of a side, or a part of them from another."""

    side: str
    setting: Setting = field(default_factory=Setting)
    #: Modules that come from elsewhere, by name.
    replaced: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Begin without requests."""
        self.trap = Trap()
        sizes = self.setting.sizes
        self.blocks = self._pool("kv_blocks", "BlockPool", "allocate", "register")(
            sizes.num_blocks, self.setting.eviction
        )
        self.slots = self._pool("state_slots", "StateSlots", "reserve", "publish")(
            sizes.max_requests, sizes.snapshot_slots
        )
        self.cache = self._pool("prefix_cache", "PrefixCache", "first_missing")(
            self.blocks,
            self.slots,
            sizes,
            self.setting.needs_state,
            self.setting.enabled,
        )
        self.scheduler = self._part("scheduler", "Scheduler")(sizes, self.cache)
        self.arrivals = 0
        #: Prompt and generated tokens of requests that ended, in that order.
        self.ended: list[list[int]] = []

    def _part(self, module: str, name: str) -> Any:
        return getattr(load(self.replaced.get(module, self.side), module), name)

    def _pool(self, module: str, name: str, *methods: str) -> Any:
        """Return a class whose methods can throw before they change anything."""
        base, trap = self._part(module, name), self.trap

        class Pool(base):
            def __deepcopy__(self, memo: dict[int, Any]) -> Any:
                # The copy has no traps.
                twin = base.__new__(base)
                memo[id(self)] = twin
                vars(twin).update(copy.deepcopy(vars(self), memo))
                return twin

        def wrap(method: str) -> Callable[..., Any]:
            def wrapped(self: Any, *args: Any) -> Any:
                # How often a side asks for nothing, or in vain, is its own affair.
                is_vain = method == "allocate" and not (
                    0 < args[0] <= self.num_free + self.num_evictable
                )
                if not is_vain:
                    trap.pass_by(method)
                return getattr(base, method)(self, *args)

            return wrapped

        for method in methods:
            setattr(Pool, method, wrap(method))
        return Pool

    @property
    def requests(self) -> list[Request]:
        """Requests in flight, in order of arrival."""
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        return sorted(everyone, key=lambda request: request.arrival)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        reports_from: int | None = None,
    ) -> str:
        """Put a request into the queue; asks for log-probabilities if told to."""
        request = make_request(self.arrivals, prompt, max_tokens, reports_from)
        self.arrivals += 1
        self.scheduler.add(request)
        return request.request_id

    def abort(self, request_id: str) -> None:
        """End a request between two steps."""
        self._finish(self.scheduler.find(request_id), FinishReason.ABORT)

    def reset(self, keep_cache: bool) -> None:
        """Abort all, and forget what is cached unless told otherwise."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, FinishReason.ABORT)
        if not keep_cache:
            self.cache.reset()

    def step(self, recorded: StepPlan | None = None) -> StepRecord:
        """Take a step, and do after a fault what an engine does.

        What the caller of an engine would have to hear of stands in ``eager_reason``.
        """
        record = StepRecord(step=self.scheduler.step + 1)
        try:
            self._run(recorded, record)
        except (Fault, LockstepError) as error:
            self._recover(error, record)
        return record

    def _run(self, recorded: StepPlan | None, record: StepRecord) -> None:
        self.trap.pass_by("plan")
        record.plan = plan = self.scheduler.plan(recorded)
        if not plan.rows:
            return
        self.trap.pass_by("forward")
        record.registered_blocks, record.stored_states = self.scheduler.commit(plan)
        self.trap.pass_by("sample")
        for row in plan.rows:
            request = self.scheduler.suspect = self.scheduler.find(row.request_id)
            self.trap.pass_by("update")
            wanted = request.prompt_logit_positions
            found = [p for p in range(row.start, row.end) if p in wanted]
            request.prompt_logprobs += [{} for _ in found]
            if row.samples:
                self._append(request, record)
        self.scheduler.suspect = None
        self.scheduler.clear_suspicion()

    def _append(self, request: Request, record: StepRecord) -> None:
        tokens = request.token_ids
        token = (tokens[-1] * 5 + tokens[len(tokens) // 2] + len(tokens) // 3) % 3
        record.tokens[request.request_id] = token
        tokens.append(token)
        request.state = RequestState.DECODE
        if request.num_generated == request.sampling.max_tokens:
            self._finish(request, FinishReason.LENGTH)
            record.finished.append(request.output())

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        assert request.state is RequestState.FINISHED
        self.ended.append(request.token_ids)

    def _recover(self, error: Exception, record: StepRecord) -> None:
        scheduler = self.scheduler
        suspect, scheduler.suspect = scheduler.suspect, None
        for request in scheduler.roll_back():
            record.interrupted.append(request.request_id)
        if isinstance(error, PlanError):
            record.eager_reason = str(error)
            return
        suspect = suspect or scheduler.ran_alone(record.plan)
        if suspect is None:
            scheduler.run_alone(record.plan)
            record.eager_reason = str(error)
        elif suspect.finish_reason is None:
            record.failed[suspect.request_id] = f"{type(error).__name__}: {error}"
            self._finish(suspect, FinishReason.ERROR)

    def export_state(self) -> State:
        """Copy all that there is to know."""
        scheduler = self.scheduler
        return State(
            step=scheduler.step,
            admissions=scheduler.admissions,
            waiting=copy.deepcopy(scheduler.waiting),
            running=copy.deepcopy(scheduler.running),
            solo=[(request.request_id, end) for request, end in scheduler.solo],
            blocks=self.blocks.export_state(),
            slots=self.slots.export_state(),
        )

    def import_state(self, state: State) -> None:
        """Take over what another knew; suspicions are forgotten."""
        self.scheduler.step = state.step
        self.scheduler.admissions = state.admissions
        self.scheduler.waiting = copy.deepcopy(state.waiting)
        self.scheduler.running = copy.deepcopy(state.running)
        self.scheduler.solo = []
        self.blocks.import_state(state.blocks)
        self.slots.import_state(state.slots)

    def check(self) -> None:
        """Check every invariant; only between steps."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.blocks.check_integrity([request.block_table for request in running])
        self.slots.check_integrity(
            [request.slot_id for request in running],
            set(self.blocks.export_state().hashes.values()),
        )
        assert not any(r.block_table or r.slot_id is not None for r in waiting)
        assert self.scheduler.suspect is None
        assert self.scheduler.has_work == bool(running or waiting)
        assert all(self.scheduler.find(r.request_id) is r for r in self.requests)


def make_request(
    arrival: int,
    prompt: Sequence[int],
    max_tokens: int = 4,
    reports_from: int | None = None,
) -> Request:
    """Make a request, which asks for log-probabilities of its prompt if told to."""
    reports = reports_from is not None
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=0,
        prompt_logprobs=0 if reports else None,
        prompt_logprobs_from=min(reports_from or 0, len(prompt) - 1),
    )
    return Request(f"r{arrival}", list(prompt), sampling, (), arrival)


def prompt_of(path: Sequence[int], tail: int) -> list[int]:
    """Return a prompt along a path through a tree of blocks; common paths, common ids.

    Args:
        path: Child taken at each depth.
        tail: Further tokens, the same for all along one path.
    """
    tokens: list[int] = []
    for depth in range(1, len(path) + 1):
        source = random.Random(repr(tuple(path[:depth])))
        tokens += [source.randrange(3) for _ in range(BLOCK)]
    return tokens + [1] * tail or [0]


def spoil(plan: StepPlan, change: str, books: Books) -> None:
    """Change a recorded plan in one way, if it has what that needs.

    Args:
        plan: Changed.
        change: One of `CHANGES`.
        books: Of the requests that the plan is about.
    """
    if change == "preempts nobody":
        plan.preempted.append("nobody")
    elif change == "preempts more":
        plan.preempted += [r.request_id for r in books.scheduler.running[:1]]
    elif change == "preempts a waiting one":
        plan.preempted += [r.request_id for r in books.scheduler.waiting[-1:]]
    elif change == "reverses rows":
        plan.rows.reverse()
    if not plan.rows:
        return
    row = plan.rows[-1]
    if change == "drops a row":
        plan.rows.pop()
    elif change == "repeats a row":
        plan.rows.append(copy.deepcopy(row))
    elif change == "flips a kind":
        is_decode = row.kind is RowKind.DECODE
        row.kind = RowKind.PREFILL if is_decode else RowKind.DECODE
    elif change == "names nobody":
        row.request_id = "nobody"
    elif change == "too many tokens":
        row.end += books.setting.max_tokens_per_step
    elif change in ("ends early", "ends late"):
        row.end += 1 if change == "ends late" else -1
    elif change in ("starts early", "starts late"):
        row.start += BLOCK if change == "starts late" else -BLOCK


def act(books: Books, action: Action) -> list[StepRecord]:
    """Do what an action says; return the records of the steps taken."""
    name, *arguments = action
    alive = books.requests
    if name == "add":
        path, tail, max_tokens, reports_from = arguments
        books.add(prompt_of(path, tail), max_tokens, reports_from)
    elif name == "turn" and books.ended:
        index, new = arguments
        prompt = books.ended[-1 - index % len(books.ended)] + [2] * new
        if len(prompt) <= BLOCK * (books.setting.num_blocks - 1):
            books.add(prompt, 4)
    elif name == "abort" and alive:
        books.abort(alive[arguments[0] % len(alive)].request_id)
    elif name == "reset":
        books.reset(*arguments)
    elif name == "step":
        return [books.step() for _ in range(*arguments)]
    elif name == "fail":
        books.trap.arm(*arguments)
        record = books.step()
        books.trap.arm("", 0)
        return [record]
    elif name == "replay":
        plan = copy.deepcopy(books).step().plan
        spoil(plan, arguments[0], books)
        return [books.step(plan)]
    return []


# What happens, drawn at random.


def random_setting(source: random.Random) -> Setting:
    """Draw sizes and options."""
    pick = source.choice
    return Setting(
        max_requests=pick((1, 2, 3, 4, 4)),
        max_tokens_per_step=pick((1, 2, 3, 5, 8, 9, 16, 16, 40)),
        num_blocks=pick((6, 6, 6, 7, 8, 9, 12, 20)),
        snapshot_slots=pick((0, 1, 2, 3, 6)),
        eviction=pick(("lru", "lru", "ref_zero")),
        needs_state=pick((True, True, True, False)),
        enabled=pick((True,) * 7 + (False,)),
    )


def random_action(source: random.Random, has_faults: bool) -> Action:
    """Draw something that happens; with faults, the cache model cannot follow."""
    pick = source.choice
    names = ["add"] * 5 + ["step"] * 6 + ["turn"] * 2 + ["abort"]
    if has_faults:
        names += ["fail"] * 3 + ["replay"] * 3 + ["hand over"]
    name = pick(names) if source.random() < 0.97 else "reset"
    arguments: dict[str, tuple[Any, ...]] = {
        "add": (
            tuple(pick((0, 0, 1)) for _ in range(pick((0, 1, 2, 3)))),
            pick((0, 0, 1, 3)),
            pick((1, 2, 4, 5, 9, 9)),
            pick((None, None, None, 0, 4, 5)),
        ),
        "step": (pick((1, 1, 2, 3, 6)),),
        "turn": (pick((0, 1, 2, 3)), pick((1, 3, 5))),
        "abort": (pick((0, 1, 2, 3)),),
        "reset": (pick((True, False)),),
        "fail": (pick(FAULTS), pick((0, 0, 1, 3))),
        "replay": (pick(CHANGES),),
    }
    return (name, *arguments.get(name, ()))


def random_trace(seed: int, has_faults: bool = True) -> tuple[Setting, list[Action]]:
    """Draw sizes, and what happens."""
    source = random.Random(seed)
    setting = random_setting(source)
    count = source.randrange(5, 40)
    return setting, [random_action(source, has_faults) for _ in range(count)]
