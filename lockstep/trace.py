"""What a step did and what an engine knows: for tests, figures, replays, take-overs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.blocks import BlockHash
from lockstep.memory import Caches
from lockstep.plan import BatchShape, RowPlan, StepPlan
from lockstep.request import Request, RequestOutput
from lockstep.state import BlockPoolState, StateSlotsState


@dataclass
class StepRecord:
    """Everything that one step did.

    Attributes:
        step: Number of the step, from 1.
        plan: The plan that was carried out; ``Engine.step(plan=...)`` replays it.
        shape: Real batch size.
        padded_shape: Batch size that was computed.
        mode: ``eager``; ``padded``, at a shape that a graph might hold; or ``graph``.
        tokens: Token drawn for each request that was due one.
        logprobs: For each request of the step, log-probabilities after every position
            it computed, ``(tokens, vocab)``; only with ``record_logprobs``.
        reported: Log-probabilities of each token drawn and of the likeliest ones, by
            id, for the requests that asked for them.
        prompt_reported: The same of prompt tokens, in their order, for each request
            some of whose were computed and asked for.
        registered_blocks: Hashes of blocks that entered the cache.
        stored_states: Hashes of blocks whose state was stored.
        aborted: Requests that were aborted during the step.
        failed: Requests that an exception ended, with its message.
        interrupted: Requests sent back to the queue by another's exception.
        finished: Outputs of requests that ended in the step, for any reason.
        host_reads: Reads of device memory that the step waited for.
        eager_reason: Why a step ran eagerly though graphs were asked for.
    """

    step: int
    plan: StepPlan = field(default_factory=StepPlan)
    shape: BatchShape = BatchShape(0, 0, 0)
    padded_shape: BatchShape = BatchShape(0, 0, 0)
    mode: str = "eager"
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    logprobs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    reported: dict[str, dict[int, float]] = field(
        default_factory=dict[str, dict[int, float]]
    )
    prompt_reported: dict[str, list[dict[int, float]]] = field(
        default_factory=dict[str, list[dict[int, float]]]
    )
    registered_blocks: list[BlockHash] = field(default_factory=list[BlockHash])
    stored_states: list[BlockHash] = field(default_factory=list[BlockHash])
    aborted: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    interrupted: list[str] = field(default_factory=list[str])
    finished: list[RequestOutput] = field(default_factory=list[RequestOutput])
    host_reads: int = 0
    eager_reason: str = ""

    @property
    def rows(self) -> list[RowPlan]:
        """The rows of the plan."""
        return self.plan.rows


@dataclass
class EngineState:
    """Everything an engine knows between two steps.

    Attributes:
        step: Steps taken.
        arrivals: Requests that ever arrived.
        admissions: Admissions so far.
        waiting: The queue, in order of arrival.
        running: Requests with blocks and a live slot, in order of admission.
        blocks: Bookkeeping of the K/V blocks.
        slots: Bookkeeping of the state slots.
        caches: Copies of both pools.
    """

    step: int
    arrivals: int
    admissions: int
    waiting: list[Request]
    running: list[Request]
    blocks: BlockPoolState
    slots: StateSlotsState
    caches: Caches
