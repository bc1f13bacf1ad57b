"""Traces: what happens to an engine over time, drawn at random or written by hand.

A trace is a list of actions and the sizes of an engine. `Player.play` runs it. After
each step it holds the engine to the rules: computed log-probabilities and tokens equal
those of the request alone, as closely as a side promises; the plan keeps to its
budgets; and the brute-force cache model agrees.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lockstep.assemble import build_components
from lockstep.blocks import num_blocks_for
from lockstep.config import Eviction, ModelConfig
from lockstep.errors import RequestError
from lockstep.plan import StepPlan
from lockstep.request import FinishReason, RequestOutput, SamplingParams
from lockstep.trace import StepRecord

from . import symbolic
from .cache_model import CacheModel, assert_agrees, assert_same_content
from .engines import backend_of, lone, make_engine
from .tolerances import assert_logprobs, assert_reports
from .trace_events import Watcher

BLOCK = 16
#: Where in a step an abort can be called, in order; the first four come before a
#: restore is done with.
PHASES = ("plan", "admit", "prepare", "forward", "commit", "sample", "update")
#: Where an exception can be thrown: in a phase, or before a pool changes.
FAULTS = (
    *("plan", "allocate", "reserve", "prepare", "forward"),
    *("commit", "register", "publish", "sample", "update"),
)
MAX_LENGTH = 160
#: The components that know no tensors.
BOOKKEEPING = (
    "scheduler.Scheduler",
    "prefix_cache.PrefixCache",
    "kv_blocks.BlockPool",
    "state_slots.StateSlots",
)


@dataclass(frozen=True)
class Add:
    """A request arrives: blocks along a path through a tree, then part of another.

    Attributes:
        path: Child taken at each depth; prompts with a common path share its blocks.
        tail: Tokens of one more block along ``0``, so that tails agree too.
        max_tokens: Most tokens to generate.
        seed: Seed of draws at temperature 1; None for greedy.
        stops: Whether an end-of-sequence token ends it.
        settings: Further sampling parameters, by name.
    """

    path: tuple[int, ...]
    tail: int = 1
    max_tokens: int = 4
    seed: int | None = None
    stops: bool = False
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Turn:
    """A finished request is continued: all its tokens, and some new ones.

    Attributes:
        index: Which finished request, counted from the latest.
        new: New tokens.
        max_tokens: Most tokens to generate.
        settings: Further sampling parameters, by name.
    """

    index: int = 0
    new: int = 3
    max_tokens: int = 4
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Step:
    """Some steps are taken."""

    count: int = 1


@dataclass(frozen=True)
class Abort:
    """A request is aborted between steps; the index counts from the latest arrival."""

    index: int = 0


@dataclass(frozen=True)
class AbortInStep:
    """A request is aborted in the midst of the next step."""

    index: int = 0
    phase: str = "forward"


@dataclass(frozen=True)
class Reset:
    """All requests are aborted, and the cache is kept or dropped."""

    keep_cache: bool = True


@dataclass(frozen=True)
class Fail:
    """An exception is thrown in the midst of the next step, if it gets there.

    Attributes:
        phase: One of `FAULTS`.
        skip: How often the step may pass there first.
    """

    phase: str = "forward"
    skip: int = 0


Action = Add | Turn | Step | Abort | AbortInStep | Reset | Fail


@dataclass(frozen=True)
class Trace:
    """Actions, and the sizes of the engine that they happen to."""

    actions: tuple[Action, ...]
    max_requests: int = 3
    max_tokens_per_step: int = 64
    num_blocks: int = 16
    snapshot_slots: int = 4
    eviction: Eviction = "lru"
    prefix_caching: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine."""
        return {
            "max_requests": self.max_requests,
            "max_tokens_per_step": self.max_tokens_per_step,
            "num_blocks": self.num_blocks,
            "snapshot_slots": self.snapshot_slots,
            "eviction": self.eviction,
            "prefix_caching": self.prefix_caching,
            "block_size": BLOCK,
            "max_length": MAX_LENGTH,
        }


_COUNTS = (1, 2, 3, 5, 15, 16, 17, 24, 33)
_INDEX = st.integers(0, 3)


#: Values of further sampling parameters, most of them off; names are fields. Tokens
#: below the models' vocabularies, a few of which end many requests.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0, 0, 1, 2, 4),
    "top_k": (None, None, 1, 2, 5),
    "top_p": (1.0, 1.0, 0.2, 0.8),
    "min_p": (0.0, 0.0, 0.3),
    "stop_token_ids": ((), (), (3,), (0, 5, 7, 11)),
    "logprobs": (None, None, 0, 3),
    "prompt_logprobs": (None, None, 0, 2),
}


@st.composite
def _settings(draw: st.DrawFn) -> tuple[tuple[str, Any], ...]:
    """Draw further sampling parameters; whatever they are, they fit each other."""
    if draw(st.booleans()):
        return ()
    found = {name: draw(st.sampled_from(all_)) for name, all_ in _SETTINGS.items()}
    if found["prompt_logprobs"] is not None:
        found["prompt_logprobs_from"] = draw(st.sampled_from((0, 1, 2, 16, 17, 30)))
    return tuple(found.items())


@st.composite
def _adds(draw: st.DrawFn, max_depth: int) -> list[Action]:
    """Draw arrivals: one, or a few whose prompts share a path."""
    path = draw(st.lists(st.integers(0, 1), max_size=max_depth).map(tuple))
    return [
        Add(
            path=path[: len(path) - draw(st.sampled_from((0, 0, 0, 1)))],
            tail=draw(st.sampled_from((0, 0, 1, 2, 3, 8, 15))),
            max_tokens=draw(st.sampled_from(_COUNTS)),
            seed=draw(st.sampled_from((None, None, 0, 1))),
            stops=draw(st.booleans()),
            settings=draw(_settings()),
        )
        for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3))))
    ]


@st.composite
def _turns(draw: st.DrawFn, is_plain: bool = False) -> list[Action]:
    """Draw a second turn, after steps that let some first turn finish."""
    index, new = draw(_INDEX), draw(st.sampled_from((1, 3, 16)))
    settings = () if is_plain else draw(_settings())
    turn = Turn(index, new, draw(st.sampled_from(_COUNTS)), settings)
    return [Step(draw(st.sampled_from((1, 10, 30)))), turn]


@st.composite
def _aborts(draw: st.DrawFn) -> list[Action]:
    """Draw an abort, in a step or between steps."""
    phase = draw(st.sampled_from((*PHASES, "")))
    index = draw(_INDEX)
    return [AbortInStep(index, phase) if phase else Abort(index)]


def traces(max_episodes: int, max_depth: int = 4) -> st.SearchStrategy[Trace]:
    """Draw a trace; pools are small, so that everything runs out.

    Args:
        max_episodes: Most groups of actions.
        max_depth: Most blocks that a prompt may share.
    """
    steps = st.sampled_from((1, 1, 2, 3, 8, 20)).map(lambda count: [Step(count)])
    resets = st.sampled_from((True, True, False)).map(lambda keep: [Reset(keep)])
    adds = _adds(max_depth)
    episodes = st.one_of(
        *(adds, adds, adds, steps, steps, _turns(), _aborts(), _aborts())
    )
    some = st.lists(
        st.one_of(episodes, episodes, episodes, episodes, resets),
        min_size=min(6, max_episodes),
        max_size=max_episodes,
    )
    return st.builds(
        Trace,
        actions=some.map(lambda lists: tuple(sum(lists, []))),
        max_requests=st.integers(1, 5),
        max_tokens_per_step=st.sampled_from((1, 2, 3, 7, 16, 17, 32, 40, 64, 200)),
        num_blocks=st.sampled_from((3, 4, 4, 5, 5, 6, 6, 7, 8, 10, 14)),
        snapshot_slots=st.sampled_from((0, 1, 1, 2, 3, 5, 9)),
        eviction=st.sampled_from(("lru", "lru", "lru", "ref_zero")),
        prefix_caching=st.sampled_from((True,) * 9 + (False,)),
    )


@st.composite
def failing(
    draw: st.DrawFn, max_episodes: int, faults: Sequence[str] = FAULTS
) -> Trace:
    """Draw a trace in which exceptions are thrown."""
    trace = draw(traces(max_episodes))
    actions = list(trace.actions)
    for _ in range(draw(st.integers(1, 4))):
        fail = Fail(draw(st.sampled_from(faults)), draw(st.sampled_from((0, 0, 1, 3))))
        actions.insert(draw(st.integers(0, len(actions))), fail)
    return replace(trace, actions=tuple(actions))


def chats() -> st.SearchStrategy[Trace]:
    """Draw traces of chats, alike or not, in as much memory as they can use."""
    steps = st.sampled_from((1, 2, 5, 20)).map(lambda count: [Step(count)])
    some = st.lists(
        st.one_of(_adds(2), _turns(True), _turns(True), steps),
        min_size=4,
        max_size=12,
    )
    return st.builds(
        Trace,
        actions=some.map(lambda lists: tuple(sum(lists, []))),
        max_requests=st.integers(1, 5),
        max_tokens_per_step=st.sampled_from((1, 7, 16, 40, 64, 200)),
        num_blocks=st.just(400),
        snapshot_slots=st.just(300),
    )


def block_of(path: tuple[int, ...], vocab_size: int) -> list[int]:
    """Return the tokens of the block at the end of a path through the tree."""
    draw = random.Random(repr(path))
    return [draw.randrange(vocab_size - 1) for _ in range(BLOCK)]


def prompt_of(add: Add, vocab_size: int) -> list[int]:
    """Return the tokens of a prompt; at least one."""
    paths = [add.path[:depth] for depth in range(1, len(add.path) + 1)]
    tokens = [token for path in paths for token in block_of(path, vocab_size)]
    tail = block_of((*add.path, 0), vocab_size)[: add.tail]
    return tokens + tail or block_of((0,), vocab_size)[:1]


# What each request must give.


@dataclass(frozen=True)
class Truth:
    """A request alone: its tokens, and log-probabilities by position.

    What is reported to its user follows from these.
    """

    token_ids: list[int]
    logprobs: Tensor


class RealModel:
    """A tiny model with witness weights, and the lone run as its truth.

    Attributes:
        is_exact: Whether arithmetic leaves nothing to round.
    """

    is_exact = False

    def __init__(self, config: ModelConfig) -> None:
        """Keep the model.

        Args:
            config: The model.
        """
        self.config = config
        self.components: dict[str, Any] = {}

    def truth(self, prompt: list[int], sampling: SamplingParams) -> Truth:
        """Serve a request alone."""
        output, logprobs = lone(self.config, prompt, sampling)
        by_position = [logprobs[position] for position in range(len(logprobs))]
        return Truth(output.token_ids, torch.stack(by_position))


class Symbols:
    """The model without arithmetic; its truth is a formula."""

    is_exact = True

    def __init__(
        self, side: str, layer_pattern: str = "M*", bookkeeping: str = ""
    ) -> None:
        """Take the parts that draw tokens from a side.

        Args:
            side: The side.
            layer_pattern: ``M*``, ``M`` or ``*``: which pools there are.
            bookkeeping: The side whose scheduler, cache and pools are used; that of
                everything else when empty.
        """
        self.config = symbolic.model_config(layer_pattern)
        self.components: dict[str, Any] = {"model.Model": symbolic.SymbolicModel}
        self.components |= dict.fromkeys(BOOKKEEPING, bookkeeping or backend_of(side))
        self.parts = build_components(backend_of(side))
        self.known: dict[tuple[tuple[int, ...], SamplingParams], Truth] = {}

    def truth(self, prompt: list[int], sampling: SamplingParams) -> Truth:
        """Work a request out."""
        key = tuple(prompt), sampling
        if key not in self.known:
            found = symbolic.serve_alone(self.config, self.parts, prompt, sampling)
            self.known[key] = Truth(*found)
        return self.known[key]


def reported(logprobs: Tensor, token: int, count: int) -> dict[int, float]:
    """Say what is reported of a position: a token, and the likeliest, lowest ids first.

    Args:
        logprobs: Of all tokens.
        token: The token that stands there.
        count: How many of the likeliest.
    """
    values: list[float] = logprobs.tolist()
    likeliest = sorted(range(len(values)), key=lambda each: (-values[each], each))
    return {each: values[each] for each in (token, *likeliest[:count])}


# Playing.


class Hook:
    """Calls a function once, the next time that a step comes to a phase."""

    def __init__(self) -> None:
        """Begin without anything to call."""
        self.phase = ""
        self.skip = 0
        self.call: Callable[[], None] = lambda: None

    def arm(self, phase: str, call: Callable[[], None], skip: int = 0) -> None:
        """Set what is to be called, in which phase, and after how many such."""
        self.phase, self.call, self.skip = phase, call, skip

    def disarm(self) -> None:
        """Call nothing."""
        self.phase = ""

    def reached(self, phase: str) -> None:
        """Note that a step is in a phase."""
        if phase != self.phase:
            return
        if self.skip:
            self.skip -= 1
            return
        self.disarm()
        self.call()

    def components(self, side: str, replaced: dict[str, Any]) -> dict[str, Any]:
        """Wrap components so that every phase of a step is noted.

        Args:
            side: Where components come from.
            replaced: Those that come from elsewhere.
        """
        parts, reached = build_components(backend_of(side), replaced), self.reached
        scheduler: Any = parts.Scheduler
        cache: Any = parts.PrefixCache
        metadata: Any = parts.MetadataBuilder

        class HookedScheduler(scheduler):
            def plan(self, recorded: StepPlan | None = None) -> StepPlan:
                reached("plan")
                return super().plan(recorded)

            def clear_suspicion(self, *args: Any) -> None:
                super().clear_suspicion(*args)
                reached("update")

        class HookedCache(cache):
            def admit(self, *args: Any, **kwargs: Any) -> bool:
                admitted = super().admit(*args, **kwargs)
                reached("admit")
                return admitted

            def commit(self, *args: Any) -> Any:
                reached("commit")
                return super().commit(*args)

        class HookedMetadata(metadata):
            def build(self, *args: Any) -> Any:
                reached("prepare")
                return super().build(*args)

        def copy_states(*args: Any) -> None:
            reached("forward")
            parts.copy_states(*args)

        def sample(*args: Any) -> Tensor:
            reached("sample")
            return parts.sample(*args)

        return {
            **replaced,
            "scheduler.Scheduler": HookedScheduler,
            "prefix_cache.PrefixCache": HookedCache,
            "metadata.MetadataBuilder": HookedMetadata,
            "kv_blocks.BlockPool": _hooked(
                parts.BlockPool, reached, "allocate", "register"
            ),
            "state_slots.StateSlots": _hooked(
                parts.StateSlots, reached, "reserve", "publish"
            ),
            "snapshots.copy_states": copy_states,
            "sampler.sample": sample,
        }


def _hooked(base: Any, reached: Callable[[str], None], *methods: str) -> Any:
    """Note calls of methods, under their names."""

    def wrap(name: str) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            reached(name)
            return getattr(base, name)(self, *args, **kwargs)

        return wrapped

    wrappers = {name: wrap(name) for name in methods}
    return type(f"Hooked{base.__name__}", (base,), wrappers)


@dataclass
class Operation:
    """Something that was done to an engine, to be done to another.

    Attributes:
        name: ``add``, ``abort``, ``step`` or ``reset``.
        request_id: Of a request that arrived or was aborted.
        prompt: Of one that arrived.
        sampling: Likewise.
        record: Of a step.
        keep_cache: Of a reset.
    """

    name: str
    request_id: str = ""
    prompt: list[int] = field(default_factory=list[int])
    sampling: SamplingParams | None = None
    record: StepRecord | None = None
    keep_cache: bool = True


def _settle(
    sampling: SamplingParams, settings: tuple[tuple[str, Any], ...], prompt: list[int]
) -> SamplingParams:
    """Set further parameters, no larger than the request allows."""
    found = dict(settings)
    if "min_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], sampling.max_tokens)
    if "prompt_logprobs_from" in found:
        first = min(found["prompt_logprobs_from"], len(prompt) - 1)
        found["prompt_logprobs_from"] = first
    return replace(sampling, **found)


class Fault(Exception):
    """Thrown on purpose."""


class Player:
    """Plays one trace on one engine and checks each step."""

    def __init__(
        self,
        trace: Trace,
        model: RealModel | Symbols,
        side: str = "reference",
        before_each: Callable[[Player], None] = lambda player: None,
    ) -> None:
        """Build the engine.

        Args:
            trace: What will happen.
            model: The model, and what its requests must give.
            side: Which engine.
            before_each: Called before each operation.
        """
        self.trace = trace
        self.before_each = before_each
        self.model = model
        self.side = side
        #: The side whose promise log-probabilities are held to.
        self.promise = "reference" if model.is_exact else side
        self.hook = Hook()
        self.engine = make_engine(
            model.config,
            side,
            self.hook.components(side, model.components),
            **trace.options,
        )
        config = model.config
        self.cache = CacheModel(
            trace.num_blocks,
            BLOCK,
            trace.snapshot_slots,
            trace.eviction == "ref_zero",
            config.num_mamba_layers > 0,
            trace.prefix_caching,
        )
        self.watcher = Watcher(BLOCK, trace.num_blocks, trace.max_requests)
        self.prompts: dict[str, list[int]] = {}
        self.sampling: dict[str, SamplingParams] = {}
        #: Until an exception is thrown, after which the model knows too little.
        self.is_modelled = True
        self.finished: dict[str, RequestOutput] = {}
        self.turns: dict[str, RequestOutput] = {}
        self.operations: list[Operation] = []

    @property
    def events(self) -> Counter[str]:
        """How often each named event was seen."""
        return self.watcher.counts

    def play(self) -> Player:
        """Do all actions, then run dry and look for leaks."""
        for action in self.trace.actions:
            self._act(action)
        self._run_dry()
        assert set(self.finished) == set(self.prompts)
        self.assert_no_leak()
        return self

    def assert_no_leak(self) -> None:
        """Check that nothing is held once all is done, nor anything kept on reset."""
        state = self.engine.export_state()
        trace = self.trace
        assert not state.blocks.holders
        assert len(state.blocks.free) + len(state.blocks.hashes) == trace.num_blocks
        assert sorted(state.slots.free_live) == list(range(trace.max_requests))
        stored = len(state.slots.stored)
        assert len(state.slots.free_snapshots) + stored == trace.snapshot_slots
        self.engine.reset()
        state = self.engine.export_state()
        assert sorted(state.blocks.free) == list(range(trace.num_blocks))
        assert len(state.slots.free_snapshots) == trace.snapshot_slots
        assert not state.blocks.hashes and not state.slots.stored

    def _act(self, action: Action) -> None:
        if isinstance(action, Add):
            self._add_new(action)
        elif isinstance(action, Turn):
            self._add_turn(action)
        elif isinstance(action, Step):
            for _ in range(action.count):
                self.step()
        elif isinstance(action, Abort):
            self._abort(action)
        elif isinstance(action, AbortInStep):
            self._abort_in_step(action)
        elif isinstance(action, Fail):
            self._fail(action)
        else:
            self._reset(action.keep_cache)

    def _add_new(self, action: Add) -> None:
        prompt = prompt_of(action, self.model.config.vocab_size)
        sampling = SamplingParams(
            temperature=0.0 if action.seed is None else 1.0,
            max_tokens=action.max_tokens,
            ignore_eos=not action.stops,
            seed=action.seed or 0,
        )
        self._add(prompt, _settle(sampling, action.settings, prompt))

    def _add_turn(self, action: Turn) -> None:
        done = list(self.finished.values())[::-1]
        if not done:
            return
        earlier = done[action.index % len(done)]
        new = block_of((len(self.prompts),), self.model.config.vocab_size)[: action.new]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=action.max_tokens, ignore_eos=True, seed=0
        )
        tokens = earlier.prompt_token_ids + earlier.token_ids + new
        request_id = self._add(tokens, _settle(sampling, action.settings, tokens))
        if request_id is not None:
            self.turns[request_id] = earlier

    def _add(self, prompt: list[int], sampling: SamplingParams) -> str | None:
        """Add a request, unless it can never run; then it must be refused."""
        request_id = f"r{len(self.prompts)}"
        total = len(prompt) + sampling.max_tokens
        fits = num_blocks_for(total - 1, BLOCK) <= self.trace.num_blocks
        if total > MAX_LENGTH or not fits:
            with pytest.raises(RequestError):
                self.engine.add(prompt, sampling, request_id)
            return None
        self.before_each(self)
        self.engine.add(prompt, sampling, request_id)
        self.prompts[request_id] = prompt
        self.sampling[request_id] = sampling
        reports = sampling.prompt_logprobs is not None
        first = sampling.prompt_logprobs_from if reports else None
        self.cache.arrive(request_id, prompt, first)
        self.watcher.arrive(request_id, prompt)
        self.operations.append(Operation("add", request_id, prompt, sampling))
        return request_id

    def _choose(self, index: int) -> str | None:
        alive = [name for name in self.prompts if name not in self.finished][::-1]
        return alive[index % len(alive)] if alive else None

    def _abort(self, action: Abort) -> None:
        request_id = self._choose(action.index)
        self.before_each(self)
        output = self.engine.abort(request_id or "nobody")
        if request_id is None:
            assert output is None
            return
        self.operations.append(Operation("abort", request_id))
        self._note_abort(output)

    def _note_abort(self, output: RequestOutput) -> None:
        if self.is_modelled:
            self.cache.leave(output.request_id)
            self.watcher.abort_between(output.request_id)
            assert_same_content(self.cache, self.engine)
        self._end(output)

    def _abort_in_step(self, action: AbortInStep) -> None:
        request_id = self._choose(action.index)
        if request_id is None:
            return

        def call() -> None:
            self.watcher.abort_within(request_id, action.phase)
            assert self.engine.abort(request_id) is None

        self.hook.arm(action.phase, call)
        self.step()
        self.hook.disarm()

    def _fail(self, action: Fail) -> None:
        """Throw an exception once; who is ended for it is the engine's to say."""

        def call() -> None:
            self.is_modelled = False
            raise Fault

        self.hook.arm(action.phase, call, action.skip)
        try:
            self.step()
        except Fault:
            # No request is to blame: the caller hears of it, and all go on.
            self.engine.check_integrity()
        self.hook.disarm()

    def _reset(self, keep_cache: bool) -> None:
        state = self.engine.export_state()
        self.before_each(self)
        self.engine.reset(keep_cache)
        for request in (*state.running, *state.waiting):
            request.finish_reason = FinishReason.ABORT
            if self.is_modelled:
                self.cache.leave(request.request_id)
                self.watcher.abort_between(request.request_id)
            self._end(request.output())
        if not keep_cache:
            self.cache.forget_all()
        if self.is_modelled:
            assert_same_content(self.cache, self.engine)
        self.operations.append(Operation("reset", keep_cache=keep_cache))

    def step(self) -> StepRecord:
        """Take one step and check all that it did."""
        waiting = [name for name in self.prompts if name in self.cache.queue]
        self.before_each(self)
        record: StepRecord = self.engine.step()
        self.operations.append(Operation("step", record=record))
        self.events[f"{record.mode} step"] += bool(record.rows)
        self._check_rows(record)
        if self.is_modelled:
            assert not record.failed and not record.interrupted
            self._check_plan(record, waiting)
            expected = assert_agrees(self.cache, self.engine, record)
            self.watcher.note(record, expected)
        for output in record.finished:
            self._end(output)
        return record

    def _check_rows(self, record: StepRecord) -> None:
        for row in record.rows:
            name = row.request_id
            if name not in record.logprobs and not self.is_modelled:
                continue
            truth = self.model.truth(self.prompts[name], self.sampling[name])
            computed = record.logprobs[name]
            expected = truth.logprobs[row.start : row.end]
            assert_logprobs(self.promise, computed, expected)
            assert (name in record.tokens) == row.samples or not self.is_modelled
            if name in record.tokens:
                place = row.end - len(self.prompts[name])
                assert record.tokens[name] == truth.token_ids[place]

    def _check_plan(self, record: StepRecord, waiting: list[str]) -> None:
        """Check budgets, the order of rows, and that at most one prompt is cut."""
        trace, rows = self.trace, record.rows
        assert record.shape.tokens <= trace.max_tokens_per_step
        assert all(row.num_tokens > 0 for row in rows)
        assert rows == record.plan.decode_rows + record.plan.prefill_rows
        names = [row.request_id for row in rows]
        assert len(set(names)) == len(names)
        assert sum(not row.samples for row in rows) <= 1
        came = [row.request_id for row in rows if row.cache is not None]
        queued = set(waiting) | set(record.plan.preempted)
        in_order = [name for name in self.prompts if name in queued]
        passed = set(in_order[: in_order.index(came[-1])]) if came else set()
        assert came == sorted(came, key=in_order.index)
        assert passed <= set(came) | set(record.plan.deferred)
        self._check_no_work_twice(record)

    def _check_no_work_twice(self, record: StepRecord) -> None:
        """Check that no two prompts compute the same missing block in one step."""
        begun: set[tuple[int, ...]] = set()
        for row in record.plan.prefill_rows:
            if not self.trace.prefix_caching:
                return
            tokens = self.engine_tokens(row.request_id, row.end)
            mine = {
                tuple(tokens[:end])
                for end in range(BLOCK, row.end + 1, BLOCK)
                if end > row.start
            }
            new = mine - set(self.cache.kv)
            assert not new & begun, "two rows compute one block"
            begun |= new

    def engine_tokens(self, name: str, count: int) -> list[int]:
        """Return the first tokens of a request, generated ones included."""
        truth = self.model.truth(self.prompts[name], self.sampling[name])
        return (self.prompts[name] + truth.token_ids)[:count]

    def _end(self, output: RequestOutput) -> None:
        name = output.request_id
        self.finished[name] = output
        self.watcher.tokens.pop(name, None)
        truth = self.model.truth(self.prompts[name], self.sampling[name])
        assert output.prompt_token_ids == self.prompts[name]
        assert output.token_ids == truth.token_ids[: len(output.token_ids)]
        if output.finish_reason not in ("abort", "error"):
            assert output.token_ids == truth.token_ids
        self._check_reports(output, truth)

    def _check_reports(self, output: RequestOutput, truth: Truth) -> None:
        """Hold what is reported to log-probabilities of the request alone."""
        sampling, prompt = self.sampling[output.request_id], output.prompt_token_ids
        first = sampling.prompt_logprobs_from
        for reports, count, tokens, start in (
            (output.prompt_logprobs, sampling.prompt_logprobs, prompt[first:], first),
            (output.logprobs, sampling.logprobs, output.token_ids, len(prompt)),
        ):
            assert (reports is None) is (count is None)
            if reports is None or count is None:
                continue
            was_whole = output.finish_reason not in ("abort", "error")
            assert len(reports) == len(tokens) or not was_whole
            for index, report in enumerate(reports):
                before = start + index - 1
                if before < 0:
                    assert report is None
                    continue
                expected = reported(truth.logprobs[before], tokens[index], count)
                assert_reports(self.promise, [report], [expected])

    def _run_dry(self) -> None:
        """Step until all is done; more steps than tokens to compute mean a livelock."""
        alive = [name for name in self.prompts if name not in self.finished]
        work = sum(
            len(self.prompts[name]) + self.sampling[name].max_tokens for name in alive
        )
        # Each preemption loses at most what the others gain; this is far above that.
        limit = 20 + 10 * work
        while self.engine.has_work:
            assert limit, "no end of steps"
            limit -= 1
            self.step()


def replayed(
    engine: Any, operations: list[Operation], forced: bool
) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Do to an engine what was done to another; yield both records of each step.

    Args:
        engine: Does it again.
        operations: What is to be done, in order.
        forced: Whether recorded plans and tokens are imposed, not only repeated.
    """
    for operation in operations:
        record = operation.record
        if operation.name == "add":
            engine.add(operation.prompt, operation.sampling, operation.request_id)
        elif operation.name == "abort":
            engine.abort(operation.request_id)
        elif operation.name == "reset":
            engine.reset(operation.keep_cache)
        elif record is not None:
            again = (
                engine.step(plan=record.plan, tokens=record.tokens)
                if forced
                else engine.step()
            )
            for request_id in record.aborted:
                # In the record that was within the step, at its end.
                again.aborted.append(request_id)
                again.finished.append(engine.abort(request_id))
            yield record, again


def assert_same_record(first: StepRecord, second: StepRecord) -> None:
    """Hold two records of one step equal in all but times."""
    assert second.step == first.step
    assert second.plan == first.plan
    assert second.shape == first.shape
    assert second.tokens == first.tokens
    assert second.registered_blocks == first.registered_blocks
    assert second.stored_states == first.stored_states
    assert second.aborted == first.aborted
    assert second.failed == first.failed
    assert second.interrupted == first.interrupted
    assert list(second.logprobs) == list(first.logprobs)
    for name, values in first.logprobs.items():
        assert torch.equal(second.logprobs[name], values)
    assert [_essence(each) for each in second.finished] == [
        _essence(each) for each in first.finished
    ]


def _essence(output: RequestOutput) -> RequestOutput:
    """Return an output without times and without what other requests explain of it."""
    cache = replace(output.cache, differs_from=None)
    return replace(output, timings=None, cache=cache)  # type: ignore[arg-type]


def second_engine(player: Player) -> Any:
    """Build an engine of the same sizes as a player's, without hooks."""
    return make_engine(
        player.model.config,
        player.side,
        player.model.components,
        **player.trace.options,
    )
