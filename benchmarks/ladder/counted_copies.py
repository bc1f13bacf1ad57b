"""States copied through a staging buffer, in as many rows as the device counts.

What it was: the third size of the buffer in `staged_copies`. A graph has as many
programs as its padded shape needs, but those of rows that hold no state end at once.

It stands alone because it takes Triton, which the other forms do without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.ladder.staged_copies import ModelByRequests
from lockstep.batch import BatchMetadata
from lockstep.memory import Caches

#: Programs that share the copy of a state, and values that each moves at a time.
_SHARES, _TILE = 16, 4096


class ModelByCount(ModelByRequests):
    """As many rows as there are states, counted on the device; the rest is skipped."""

    def _prepare(self, batch: BatchMetadata) -> None:
        """Count the states, whose entries come before those of padding."""
        slots = batch.snapshot_slot_ids
        self._count = (slots != self.sizes.dummy_slot).sum()
        self._rows = torch.arange(len(slots), device=slots.device)

    def _stage(self, ssm_states: Tensor, batch: BatchMetadata) -> None:
        """Copy states into the buffer at once."""
        slots, staged = batch.snapshot_slot_ids, self._staging[self._layer]
        copy_rows(ssm_states[None], staged[None], slots, self._rows, self._count)

    def _commit(self, batch: BatchMetadata, caches: Caches) -> None:
        """Copy them into slots, all layers at once."""
        slots = batch.snapshot_slot_ids
        copy_rows(self._staging, caches.ssm, self._rows, slots, self._count)


def copy_rows(
    source: Tensor,
    target: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    count: Tensor,
) -> None:
    """Copy some rows of every layer, as many as a number on the device says.

    Cost: one launch; programs of other rows end at once.

    Args:
        source: By layer and row, each row contiguous.
        target: Likewise.
        source_rows: Rows to copy.
        target_rows: Where each goes.
        count: How many of these count, from the first.
    """
    layers, rows = len(source), len(source_rows)
    _copy_rows_kernel[(_SHARES, rows, layers)](
        *(source, target, source_rows, target_rows, count),
        *(source.stride(0), target.stride(0)),
        SIZE=source[0, 0].numel(),
        SHARES=_SHARES,
        TILE=_TILE,
        num_warps=8,
    )


@triton.jit
def _copy_rows_kernel(
    source, target, source_rows, target_rows, count, source_stride, target_stride,
    SIZE: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    share, row, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(count):
        return
    source += layer.to(tl.int64) * source_stride + tl.load(source_rows + row) * SIZE
    target += layer.to(tl.int64) * target_stride + tl.load(target_rows + row) * SIZE
    for first in range(share * TILE, SIZE, SHARES * TILE):
        places = first + tl.arange(0, TILE)
        mask = places < SIZE
        tl.store(target + places, tl.load(source + places, mask), mask)
