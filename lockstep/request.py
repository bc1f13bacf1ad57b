"""Requests: what users ask, what they get, and what an engine keeps in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

from lockstep.blocks import BlockHash, extend_hashes
from lockstep.errors import RequestError
from lockstep.plan import CacheReport

#: Seeds are unsigned 64-bit numbers, stored as signed ones.
MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, when a request ends, and what is reported.

    In this order: tokens that may not come yet are banned, logits are divided by the
    temperature, and of what is left first ``top_k``, then ``top_p``, then ``min_p``
    keep a part. Log-probabilities are those of the model: before bans, temperature and
    filters.

    Attributes:
        temperature: Divides the logits; 0 means greedy, whatever the filters are: the
            largest logit, the lowest id on ties.
        max_tokens: Most tokens to generate.
        min_tokens: Tokens to generate before an end-of-sequence or stop token may come.
        top_k: Likeliest tokens to draw from, exactly as many, the lowest ids on ties; 0
            or None is off.
        top_p: Draw from the fewest of the likeliest tokens whose probabilities come to
            this share, the lowest ids on ties; 1 is off.
        min_p: Draw from tokens at least this share as likely as the likeliest; 0 is
            off.
        seed: Key of the random draws; a draw depends on seed, position and token id
            alone. Drawn afresh when None.
        ignore_eos: Whether to go on after an end-of-sequence token; stop tokens end a
            request all the same.
        stop_token_ids: Tokens that end a request, besides those of the model.
        stop: Strings that end the text, which ends before them; a single one will do.
            They do so at any length: ``min_tokens`` holds back ids alone. An engine
            knows no text: `LLM` looks for them.
        logprobs: How many of the likeliest tokens to report at each position, besides
            the one chosen; None reports nothing.
        prompt_logprobs: The same for the tokens of the prompt. They have to be
            computed, so a cached prefix is skipped only up to the first one.
        prompt_logprobs_from: Position of the first prompt token to report.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0

    def __post_init__(self) -> None:
        """Check every field; lists become tuples."""
        # Set once, while the object is made: afterwards it is frozen and hashable.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        for name, low, high in _REALS:
            _check_real(name, getattr(self, name), low, high)
        if not self.top_p:
            raise RequestError(f"top_p is {self.top_p}; it must be more than 0")
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_integer(name, value, least)
        for token in ids:
            _check_integer("stop_token_ids", token, 0)
        _check_type("ignore_eos", self.ignore_eos, bool, "True or False")
        for string in self.stop:
            _check_type("stop", string, str, "a text, or a list of them")
        self._check_together()

    def _check_together(self) -> None:
        """Check what the kinds of the fields alone do not say."""
        if "" in self.stop:
            raise RequestError("stop has an empty text; it must have a character")
        for name in ("seed", "top_k"):
            if (getattr(self, name) or 0) > MAX_SEED:
                value = getattr(self, name)
                raise RequestError(f"{name} is {value}; it must lie in [0, 2**63)")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; max_tokens is only {self.max_tokens}"
            )
        if self.prompt_logprobs_from and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprobs_from is {self.prompt_logprobs_from}, but "
                "prompt_logprobs is not set"
            )


#: Largest float32, in which logits are divided: a larger temperature is infinite there.
MAX_TEMPERATURE = (2 - 2**-23) * 2.0**127
#: Real numbers: the range of each.
_REALS = (
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
)
#: Whole numbers: the least value of each, and those that may be None.
_INTEGERS = {
    "max_tokens": 1,
    **dict.fromkeys(("min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), 0),
    "prompt_logprobs_from": 0,
}
_OPTIONAL = ("top_k", "seed", "logprobs", "prompt_logprobs")


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise RequestError(f"{name} is {values!r}; it must be a list")
    return tuple(cast("list[Any]", values))


def _check_type(name: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}; it must be a number")
    if not low <= value <= high:
        limits = f"[{low:g}, {high:g}]"
        raise RequestError(f"{name} is {value}; it must be finite and in {limits}")


def _check_integer(name: str, value: object, least: int) -> None:
    if type(value) is not int:
        raise RequestError(f"{name} is {value!r}; it must be an integer")
    if value < least:
        raise RequestError(f"{name} is {value}; it must be at least {least}")


@dataclass
class Timings:
    """Moments in a request's life, in seconds of a monotonic clock."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list[float])

    def note_admission(self) -> None:
        """Note that the request was admitted now."""
        self.admitted = time.perf_counter()

    def add_token(self) -> None:
        """Note that a token came now."""
        self.tokens.append(time.perf_counter())

    @property
    def queue(self) -> float | None:
        """Seconds from arrival to first admission."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def first_token(self) -> float | None:
        """Seconds from arrival to the first token; None before there is one."""
        return self.tokens[0] - self.arrived if self.tokens else None

    @property
    def per_token(self) -> float | None:
        """Mean seconds between tokens; None before the second."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


@dataclass(frozen=True)
class RequestOutput:
    """What a finished request gave.

    Attributes:
        request_id: The request.
        prompt_token_ids: Its prompt.
        token_ids: Generated tokens, with the end-of-sequence token if one came.
        text: Generated text; empty from an engine, filled by `LLM`.
        finish_reason: Why it ended.
        error: Message of the exception that ended it, if one did.
        logprobs: For each generated token, log-probabilities by token id; None unless
            asked for.
        prompt_logprobs: The same for each prompt token from the first one asked for
            on, as far as the request got; the token at position 0 has nothing before it
            and stands as None.
        cache: What the prefix cache did at the first admission.
        timings: When what happened.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    cache: CacheReport
    timings: Timings
    text: str = ""
    error: str = ""
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass
class Request:
    """A request inside an engine.

    Attributes:
        request_id: Unique among requests in flight.
        prompt_token_ids: The prompt.
        sampling: How tokens are drawn; its seed is set.
        eos_token_ids: End-of-sequence tokens that end it; empty if it ignores them.
        arrival: Its number in order of arrival.
        state: Where it is.
        token_ids: Prompt and generated tokens.
        num_computed: Leading tokens whose K/V and state exist; the live slot holds the
            state after exactly these.
        prefill_end: Tokens to compute before the next sample; set at admission.
        block_table: Its blocks.
        num_shared_blocks: Leading blocks of the table found in the cache.
        num_registered_blocks: Leading blocks of the table known to the cache.
        hashes: One hash for each full block of ``token_ids``.
        branch: Tokens whose blocks were matched at admission.
        slot_id: Live state slot; None while waiting.
        initial_slot_id: Slot that its next slice starts from.
        decode_snapshot: Hash under which its latest decode snapshot is stored.
        admission: Its number in order of admission; 0 before.
        last_step: Last step in which it had a row.
        abort_reason: Why it is to end with the running step; None while it goes on.
        admission_report: What the cache did at its latest admission.
        cache: What the cache did at its first admission.
        differs_from: Where it departs from the tokens that an earlier request, whose
            prompt it repeats, had generated.
        finish_reason: Why it ended.
        error: Message of the exception that ended it.
        logprobs: Reported log-probabilities of generated tokens.
        prompt_logprobs: Those of prompt tokens, from the first one asked for on.
        timings: When what happened.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival: int
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    prefill_end: int = 0
    block_table: list[int] = field(default_factory=list[int])
    num_shared_blocks: int = 0
    num_registered_blocks: int = 0
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    branch: int = 0
    slot_id: int | None = None
    initial_slot_id: int = 0
    decode_snapshot: BlockHash | None = None
    admission: int = 0
    last_step: int = 0
    abort_reason: FinishReason | None = None
    admission_report: CacheReport | None = None
    cache: CacheReport | None = None
    differs_from: int | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    prompt_logprobs: list[dict[int, float] | None] = field(
        default_factory=list[dict[int, float] | None]
    )
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        """Start with the prompt alone, whose first token follows nothing."""
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        if not self.prompt_logprobs and not self.sampling.prompt_logprobs_from:
            self.prompt_logprobs = [None]

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def max_length(self) -> int:
        """Most tokens that it can come to."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end it: end-of-sequence tokens and its own stop tokens."""
        return (*self.eos_token_ids, *self.sampling.stop_token_ids)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that may not be drawn next: all that end it, while it is too short."""
        is_short = self.num_generated < self.sampling.min_tokens
        return self.end_token_ids if is_short else ()

    @property
    def prompt_logit_positions(self) -> range:
        """Positions after which logits are still needed to report prompt tokens.

        A token is reported from the logits after its predecessor. What was reported
        once is not needed again, though a preemption may have it computed again.
        """
        if self.sampling.prompt_logprobs is None:
            return range(0)
        first = self.sampling.prompt_logprobs_from + len(self.prompt_logprobs)
        return range(first - 1, len(self.prompt_token_ids) - 1)

    def logit_positions(self, start: int, end: int, samples: bool) -> list[int]:
        """List the positions of a slice after which logits are needed.

        Args:
            start: First position computed.
            end: One past the last position computed.
            samples: Whether a token is drawn after the last.
        """
        wanted = self.prompt_logit_positions
        reported = range(max(start, wanted.start), min(end, wanted.stop))
        return [*reported, *([end - 1] if samples else [])]

    def update_hashes(self, block_size: int) -> None:
        """Hash the blocks that its tokens have completed."""
        extend_hashes(self.hashes, self.token_ids, block_size)

    def output(self) -> RequestOutput:
        """Sum up a finished request."""
        assert self.finish_reason is not None
        sampling = self.sampling
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt_token_ids),
            token_ids=self.token_ids[len(self.prompt_token_ids) :],
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=None if sampling.logprobs is None else self.logprobs,
            prompt_logprobs=(
                None if sampling.prompt_logprobs is None else self.prompt_logprobs
            ),
            cache=replace(self.cache or CacheReport(), differs_from=self.differs_from),
            timings=self.timings,
        )
