"""Plans of single steps with their requests, built directly or drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from lockstep.batch import BatchMetadata
from lockstep.blocks import ROOT_HASH, num_blocks_for
from lockstep.config import Sizes
from lockstep.plan import RowKind, RowPlan, SnapshotPlan, StepPlan
from lockstep.request import Request, SamplingParams
from tests.factories import load

NUM_BLOCKS = 4096
MAX_REQUESTS = 16
SNAPSHOT_SLOTS = 64
VOCAB_SIZE = 1000
#: States that a prefill row stores in one step, at most.
MOST_SNAPSHOTS = 3


def make_sizes(scan_chunk_size: int = 16, blocks: int = 1) -> Sizes:
    """Settle sizes; a block is as many scan chunks as asked for."""
    return Sizes(
        max_requests=MAX_REQUESTS,
        max_tokens_per_step=8192,
        max_length=8192,
        block_size=blocks * scan_chunk_size,
        scan_chunk_size=scan_chunk_size,
        num_blocks=NUM_BLOCKS,
        snapshot_slots=SNAPSHOT_SLOTS,
        bytes_per_block=1,
        bytes_per_slot=1,
    )


@dataclass
class Slice:
    """One row to be: which tokens it computes, and what of its prefix is shared.

    Attributes:
        start: First position.
        end: One past the last position.
        num_shared: Leading blocks found in the cache.
        rest: Tokens of the prompt behind ``end``; their blocks are in the table.
        snapshots: Positions whose state is stored.
        is_resumed: Whether it starts from a stored state.
        sampling: How its token is drawn.
        ends: Its end-of-sequence tokens.
        generated: Tokens, of the last ones, that are not of the prompt.
    """

    start: int
    end: int
    num_shared: int = 0
    rest: int = 0
    snapshots: list[int] = field(default_factory=list[int])
    is_resumed: bool = False
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(seed=0))
    ends: tuple[int, ...] = ()
    generated: int = 0


Step = tuple[StepPlan, dict[str, Request]]


class _Builder:
    """Hands out ids, none of them twice."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.plan = StepPlan()
        self.requests: dict[str, Request] = {}
        # Odd strides, so that ids are out of order.
        self.blocks = [(7 * i + 3) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
        self.live = [(5 * i + 2) % MAX_REQUESTS for i in range(MAX_REQUESTS)]
        self.stored = [
            sizes.first_snapshot_slot + (11 * i + 4) % SNAPSHOT_SLOTS
            for i in range(SNAPSHOT_SLOTS)
        ]

    def add(self, kind: RowKind, piece: Slice) -> None:
        """Append a row and its request."""
        name = f"request-{len(self.requests)}"
        length = piece.end + piece.rest
        tokens = [
            (31 * len(self.requests) + 17 * p) % VOCAB_SIZE for p in range(length)
        ]
        request = Request(name, tokens, piece.sampling, piece.ends, len(self.requests))
        request.prompt_token_ids = tokens[: max(1, length - piece.generated)]
        slot = self.live.pop()
        initial = (
            slot if piece.start or kind is RowKind.DECODE else self.sizes.zero_slot
        )
        if piece.is_resumed:
            initial = self.stored.pop()
        count = num_blocks_for(length, self.sizes.block_size)
        row = RowPlan(
            request_id=name,
            kind=kind,
            start=piece.start,
            end=piece.end,
            samples=not piece.rest,
            slot_id=slot,
            initial_slot_id=initial,
            block_table=[self.blocks.pop() for _ in range(count)],
            num_shared_blocks=piece.num_shared,
            snapshots=[
                SnapshotPlan(position, self.stored.pop(), ROOT_HASH)
                for position in piece.snapshots
            ],
        )
        self.plan.rows.append(row)
        self.requests[name] = request


def make_step(sizes: Sizes, decodes: list[Slice], prefills: list[Slice]) -> Step:
    """Build a plan and its requests."""
    builder = _Builder(sizes)
    for piece in decodes:
        builder.add(RowKind.DECODE, piece)
    for piece in prefills:
        builder.add(RowKind.PREFILL, piece)
    return builder.plan, builder.requests


def edge_lengths(sizes: Sizes) -> list[int]:
    """List the lengths at which something changes, and some odd ones."""
    chunk, block = sizes.scan_chunk_size, sizes.block_size
    around = [1, 2, 3, chunk - 1, chunk, chunk + 1, block - 1, block, block + 1]
    return sorted({*around, 2 * chunk + 5, 2 * block + 1, 37})


def boundaries(piece: Slice, sizes: Sizes) -> list[int]:
    """List the positions at which a slice could store a state."""
    size = sizes.block_size
    return list(range((piece.start // size + 1) * size, piece.end + 1, size))


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """Draw how a token is drawn."""
    first = draw(st.none() | st.sampled_from([0, 1, 2, 15, 16, 17, 40]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        top_k=draw(st.sampled_from([None, 0, 5])),
        top_p=draw(st.sampled_from([0.3, 0.9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        seed=draw(st.none() | st.sampled_from([0, 1, 2**63 - 1])),
        stop_token_ids=draw(st.sampled_from([(), (7,), (7, 9, 8)])),
        prompt_logprobs=None if first is None else 2,
        prompt_logprobs_from=first or 0,
    )


@st.composite
def slices(draw: st.DrawFn, sizes: Sizes, is_decode: bool) -> Slice:
    """Draw a row: any start, lengths at the edges, shared blocks, stored states."""
    edges = edge_lengths(sizes)
    start = draw(st.sampled_from([0, *edges]))
    length = 1 if is_decode else draw(st.sampled_from(edges))
    piece = Slice(start, start + length, sampling=draw(samplings()))
    piece.num_shared = draw(st.integers(0, (start + length) // sizes.block_size))
    piece.rest = 0 if is_decode else draw(st.sampled_from([0, 0, 1, 40]))
    piece.ends = draw(st.sampled_from([(), (3,)]))
    piece.generated = draw(st.sampled_from([0, 1, 2, 3, 20]))
    piece.is_resumed = not is_decode and start > 0 and draw(st.booleans())
    points = boundaries(piece, sizes)
    if points:
        chosen = draw(st.sets(st.sampled_from(points), max_size=MOST_SNAPSHOTS))
        piece.snapshots = sorted(chosen)
    return piece


@st.composite
def steps(draw: st.DrawFn, sizes: Sizes) -> Step:
    """Draw a step of one row or more."""
    decodes = draw(st.lists(slices(sizes, is_decode=True), max_size=4))
    least = 0 if decodes else 1
    rows = slices(sizes, is_decode=False)
    return make_step(sizes, decodes, draw(st.lists(rows, min_size=least, max_size=4)))


def build(side: str, sizes: Sizes, step: Step, all_logits: bool) -> BatchMetadata:
    """Build a step's arrays."""
    builder = load(side, "metadata").MetadataBuilder(sizes, torch.get_default_device())
    return builder.build(*step, all_logits)


@dataclass(frozen=True)
class Padding:
    """Room for more than there is: rows of each kind, tokens besides, columns."""

    prefills: int = 0
    decodes: int = 0
    tokens: int = 0
    columns: int = 0

    def extend(self, real: Any, sizes: Sizes) -> Any:
        """Return the sizes of all arrays that these, and the real ones, come to."""
        prefills, decodes = real.prefills + self.prefills, real.decodes + self.decodes
        prefilled = real.tokens - real.decodes + (self.tokens if prefills else 0)
        rows = prefills + decodes
        chunks = prefilled // sizes.scan_chunk_size + 2 * prefills
        return real._replace(
            tokens=decodes + prefilled,
            prefills=prefills,
            decodes=decodes,
            snapshots=MOST_SNAPSHOTS * prefills,
            scan_chunks=chunks,
            table_blocks=real.table_blocks + self.columns,
            logits=max(real.logits, rows),
            draws=rows,
            banned=real.banned + self.columns,
        )


def build_padded(sizes: Sizes, step: Step, padding: Padding) -> BatchMetadata:
    """Build a step's arrays with room for more of everything."""
    builder = load("optimized", "metadata").MetadataBuilder(
        sizes, torch.get_default_device()
    )
    builder._padded = lambda real, all_logits: padding.extend(real, sizes)
    return builder.build(*step, False)


@st.composite
def paddings(draw: st.DrawFn) -> Padding:
    """Draw some room."""
    few = st.integers(0, 3)
    return Padding(draw(few), draw(few), draw(st.integers(0, 40)), draw(few))
