"""What the model sees of a step: the arrays that metadata makes from a plan.

Every count stands twice, real and padded; on the reference side they are equal. Where
padding stands, and what it holds, is part of the layout:

* Arrays by token and by row hold decode rows first: token ``i`` and row ``i`` below
  ``padded_shape.decode_requests`` belong to decode row ``i``, and prefill follows, row
  after row. So prefill begins at the *padded* number of decode rows.
* In all other arrays the real entries come first and padding follows.
* A padded token writes the dummy block and visits no expert; a padded row has no tokens
  and no context, starts from the zero slot and writes the dummy slot; a padded scan
  chunk is empty and belongs to the last padded row; a padded snapshot is taken at
  prefill offset 0 and goes to the dummy slot.
* A row of a plan has at least one token, so a real row has at least one scan chunk.
* At most ``tokens // scan_chunk_size + 2 * prefill_requests`` scan chunks and
  ``3 * prefill_requests`` snapshots arise from a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.plan import BatchShape
from lockstep.shapes import (
    BannedIds,
    BlockTables,
    CumulativeLens,
    PerDecode,
    PerPrefill,
    PerRequest,
    PerRow,
    PerRowReal,
    PerScanChunk,
    PerSnapshot,
    ScanInputs,
    StateProjections,
    TimeSteps,
    TokenIds,
    TokenMask,
)


class Draws(NamedTuple):
    """How the tokens of a step are drawn, an entry for each.

    Attributes:
        temperatures: Divides the logits; 0 takes the largest. In float32.
        top_ks: Likeliest tokens to draw from; 0 for all.
        top_ps: Share of the probability to draw from; 1 for all. In float64, in which
            the shares are added up.
        min_ps: Least probability, as a share of the largest; 0 for any. In float64.
        seeds: Key of the random numbers; read as 64 unsigned bits.
        positions: Position that the drawn token will have.
        banned_ids: Tokens that may not be drawn, -1 after the last of each row.
    """

    temperatures: PerRowReal
    top_ks: PerRow
    top_ps: PerRowReal
    min_ps: PerRowReal
    seeds: PerRow
    positions: PerRow
    banned_ids: BannedIds


@dataclass(frozen=True)
class BatchMetadata:
    """Index arrays of one step, on the device.

    *Prefill offsets* count from the first prefill token of the batch.

    Attributes:
        shape: Real size of the batch.
        padded_shape: Size of the arrays.
        num_snapshots: Real count of states to store during prefill.
        num_logits: Real count of tokens whose logits are wanted.
        num_samples: Real count of tokens to draw.
        token_ids: Tokens to compute.
        positions: Absolute position of each token.
        token_mask: Which tokens are real.
        kv_index: Where each token's K/V goes: ``block_id * block_size + offset``; in
            the dummy block for padding and for tokens of shared blocks.
        block_tables: Blocks of each row, dummy block after the last; as wide as the
            longest, or wider.
        context_lens: Tokens that the row's last token attends to, itself included.
        decode_slot_ids: Live slot of each decode row, read and written.
        decode_snapshot_slot_ids: Slot that takes a decode row's state after the step;
            the dummy slot where none is stored.
        cu_prefill_lens: Prefill offsets at which rows begin, and the end.
        prefill_starts: Absolute position of each prefill row's first token.
        prefill_slot_ids: Live slot that each prefill row writes.
        initial_slot_ids: Slot that each prefill row starts from.
        snapshot_rows: Prefill row of each state to store.
        snapshot_ends: Prefill offset one past the last token of that state.
        snapshot_slot_ids: Slot that takes it.
        cu_scan_chunks: Prefill offsets at which scan chunks begin, and the end; chunks
            are cut at absolute multiples of the scan chunk and at row ends.
        scan_chunk_rows: Prefill row of each scan chunk.
        last_scan_chunks: Last scan chunk of each prefill row.
        snapshot_scan_chunks: Scan chunk at whose end each stored state is known.
        logit_index: Tokens whose logits are wanted, in batch order; these are the rows
            of the logits.
        sample_index: Rows of the logits from which a token is drawn.
        draws: How each token is drawn; a padded draw is greedy.
    """

    shape: BatchShape
    padded_shape: BatchShape
    num_snapshots: int
    num_logits: int
    num_samples: int
    token_ids: TokenIds
    positions: TokenIds
    token_mask: TokenMask
    kv_index: TokenIds
    block_tables: BlockTables
    context_lens: PerRequest
    decode_slot_ids: PerDecode
    decode_snapshot_slot_ids: PerDecode
    cu_prefill_lens: CumulativeLens
    prefill_starts: PerPrefill
    prefill_slot_ids: PerPrefill
    initial_slot_ids: PerPrefill
    snapshot_rows: PerSnapshot
    snapshot_ends: PerSnapshot
    snapshot_slot_ids: PerSnapshot
    cu_scan_chunks: CumulativeLens
    scan_chunk_rows: PerScanChunk
    last_scan_chunks: PerPrefill
    snapshot_scan_chunks: PerSnapshot
    logit_index: PerRow
    sample_index: PerRow
    draws: Draws

    @property
    def num_decode_tokens(self) -> int:
        """Leading tokens of the arrays that belong to decode rows, padding included."""
        return self.padded_shape.decode_requests


class ScanTokens(NamedTuple):
    """What the selective scan takes in for each token; letters as in the paper.

    Attributes:
        x: Inputs after convolution.
        dt: Raw time steps, before bias and softplus.
        B: Projections into the state.
        C: Projections out of the state.
    """

    x: ScanInputs
    dt: TimeSteps
    B: StateProjections
    C: StateProjections
