"""Requests: what users ask, what they get, and what an engine keeps in between."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lockstep.blocks import BlockHash, extend_hashes
from lockstep.config import check_fields
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
    """How tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 means greedy: the largest logit, the lowest
            id on ties.
        max_tokens: Most tokens to generate.
        ignore_eos: Whether to go on after an end-of-sequence token.
        seed: Key of the random draws; a draw depends on seed, position and token id
            alone. Drawn afresh when None.
        logprobs: How many of the likeliest tokens to report at each position, besides
            the one chosen; None reports nothing.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(
                f"temperature is {self.temperature}; it must be finite and at least 0"
            )
        check_fields(self, RequestError)
        if self.seed is not None and self.seed > MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must lie in [0, 2**63)")


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
        eos_token_ids: Tokens that end it.
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
        abort_requested: Whether it was aborted while a step was running.
        admission_report: What the cache did at its latest admission.
        cache: What the cache did at its first admission.
        differs_from: Where it departs from the tokens that an earlier request, whose
            prompt it repeats, had generated.
        finish_reason: Why it ended.
        error: Message of the exception that ended it.
        logprobs: Reported log-probabilities.
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
    abort_requested: bool = False
    admission_report: CacheReport | None = None
    cache: CacheReport | None = None
    differs_from: int | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        """Start with the prompt alone."""
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def max_length(self) -> int:
        """Most tokens that it can come to."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def update_hashes(self, block_size: int) -> None:
        """Hash the blocks that its tokens have completed."""
        extend_hashes(self.hashes, self.token_ids, block_size)

    def output(self) -> RequestOutput:
        """Sum up a finished request."""
        assert self.finish_reason is not None
        reported = self.logprobs if self.sampling.logprobs is not None else None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt_token_ids),
            token_ids=self.token_ids[len(self.prompt_token_ids) :],
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=reported,
            cache=replace(self.cache or CacheReport(), differs_from=self.differs_from),
            timings=self.timings,
        )
