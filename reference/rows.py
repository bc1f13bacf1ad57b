"""The prefill rows of a batch as plain numbers, for loops.

The optimized side has no such module: it never reads these arrays on the host.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lockstep.batch import BatchMetadata


class PrefillRow(NamedTuple):
    """One prefill row; offsets count from the first prefill token of the batch.

    Attributes:
        start: Offset of its first token.
        end: Offset one past its last token.
        position: Absolute position of its first token.
        initial_slot: State slot that it starts from.
        live_slot: State slot that it writes.
        snapshots: States to store: the offset one past a token, and the slot that takes
            the state after that token.
        block_table: Blocks of its positions, padded at the end.
    """

    start: int
    end: int
    position: int
    initial_slot: int
    live_slot: int
    snapshots: list[tuple[int, int]]
    block_table: Tensor


def prefill_rows(batch: BatchMetadata) -> list[PrefillRow]:
    """List the prefill rows of a batch, in order."""
    bounds = batch.cu_prefill_lens.tolist()
    snapshots: list[list[tuple[int, int]]] = [[] for _ in bounds[1:]]
    ends, slots = batch.snapshot_ends.tolist(), batch.snapshot_slot_ids.tolist()
    rows = batch.snapshot_rows.tolist()[: batch.num_snapshots]
    for row, end, slot in zip(rows, ends, slots, strict=False):
        snapshots[row].append((end, slot))
    columns = zip(
        bounds[:-1],
        bounds[1:],
        batch.prefill_starts.tolist(),
        batch.initial_slot_ids.tolist(),
        batch.prefill_slot_ids.tolist(),
        snapshots,
        batch.block_tables[batch.num_decode_tokens :],
        strict=True,
    )
    return [PrefillRow(*values) for values in columns]
