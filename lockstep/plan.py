"""What one step will do: the plan that a scheduler makes and that can be replayed.

Plain integers and lists; nothing here needs torch. Positions are absolute: token 0 is
the first of the prompt, whatever was skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.blocks import BlockHash


class RowKind(StrEnum):
    """How a row takes part in a step."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, order=True)
class BatchShape:
    """Size of a batch; the order of fields is the order in which shapes compare."""

    tokens: int
    prefill_requests: int
    decode_requests: int

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prefill rows; a decode row has one."""
        return self.tokens - self.decode_requests

    @property
    def rows(self) -> int:
        """Rows of either kind."""
        return self.prefill_requests + self.decode_requests


class SkipLimit(StrEnum):
    """Why no more tokens of a prompt were skipped."""

    ALL_MATCHED = "all_matched"
    CACHING_OFF = "caching_off"
    SHORT_PROMPT = "short_prompt"
    NO_MATCH = "no_match"
    NO_STATE = "no_state"
    STATE_DEPTH = "state_depth"
    LAST_TOKEN = "last_token"
    PROMPT_LOGPROBS = "prompt_logprobs"


@dataclass(frozen=True)
class CacheReport:
    """What the prefix cache did for one request, in tokens.

    Attributes:
        matched_kv_tokens: Leading tokens whose K/V blocks were cached.
        matched_state_tokens: Deepest position within that with a stored state.
        num_skipped_tokens: Tokens that were not computed.
        limit: What kept more from being skipped.
        reason: The same in words, with the numbers.
        differs_from: Where the prompt departs from the tokens that an earlier request,
            whose prompt it repeats, had generated: text that was tokenized again can
            come out as other tokens. None where it does not depart.
    """

    matched_kv_tokens: int = 0
    matched_state_tokens: int = 0
    num_skipped_tokens: int = 0
    limit: SkipLimit = SkipLimit.NO_MATCH
    reason: str = ""
    differs_from: int | None = None


@dataclass(frozen=True)
class SnapshotPlan:
    """One state to be stored: the state after ``position`` tokens goes to a slot."""

    position: int
    slot_id: int
    block_hash: BlockHash


@dataclass
class RowPlan:
    """One request's place in a step: it computes tokens ``start`` to ``end - 1``.

    Attributes:
        request_id: Whose tokens.
        kind: Decode rows compute one token after their prompt; all others prefill.
        start: First position computed.
        end: One past the last position computed.
        samples: Whether the last token's logits give a new token.
        slot_id: Live state slot that the row writes.
        initial_slot_id: State slot that the row starts from: the zero slot, a
            snapshot, or its own live slot.
        block_table: Block ids of positions 0 to ``end - 1``, in order.
        num_shared_blocks: Leading blocks found in the cache; never written.
        snapshots: States to be stored, by ascending position.
        cache: What was matched and skipped; set on a row that is admitted here.
    """

    request_id: str
    kind: RowKind
    start: int
    end: int
    samples: bool
    slot_id: int
    initial_slot_id: int
    block_table: list[int]
    num_shared_blocks: int = 0
    snapshots: list[SnapshotPlan] = field(default_factory=list[SnapshotPlan])
    cache: CacheReport | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the row computes in this step."""
        return self.end - self.start


@dataclass
class StepPlan:
    """All rows of one step, decode rows first, and what planning had to do for them.

    Attributes:
        rows: Decode rows, then prefill rows.
        preempted: Requests that lost their blocks and slot, in order.
        deferred: Requests put off since another request is computing their prefix.
        blocked: Why the queue's head could not be admitted; empty when it could.
        evicted_blocks: Hashes of cached blocks given up for new ones.
        evicted_states: Hashes of blocks whose snapshot was given up.
    """

    rows: list[RowPlan] = field(default_factory=list[RowPlan])
    preempted: list[str] = field(default_factory=list[str])
    deferred: list[str] = field(default_factory=list[str])
    blocked: str = ""
    evicted_blocks: list[BlockHash] = field(default_factory=list[BlockHash])
    evicted_states: list[BlockHash] = field(default_factory=list[BlockHash])

    @property
    def decode_rows(self) -> list[RowPlan]:
        """Rows that decode."""
        return [row for row in self.rows if row.kind is RowKind.DECODE]

    @property
    def prefill_rows(self) -> list[RowPlan]:
        """Rows that prefill."""
        return [row for row in self.rows if row.kind is RowKind.PREFILL]

    @property
    def shape(self) -> BatchShape:
        """Real size of the batch."""
        return BatchShape(
            tokens=sum(row.num_tokens for row in self.rows),
            prefill_requests=len(self.prefill_rows),
            decode_requests=len(self.decode_rows),
        )
