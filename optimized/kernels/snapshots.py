"""Copies of whole states, of real targets alone."""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.memory import Caches
from lockstep.shapes import PerDecode

#: Programs that share the copies of a layer, and values that each moves at a time.
_SHARES = 16
_TILE = 4096


def copy_states(
    caches: Caches,
    source_slot_ids: PerDecode,
    target_slot_ids: PerDecode,
    dummy_slot: int,
) -> None:
    """Copy the states of all rows of which something is kept; others cost nothing.

    Cost: one launch; each state that is kept is read and written once.
    """
    layers, rows = len(caches.ssm), len(source_slot_ids)
    if not rows:
        return
    _copy_states_kernel[(_SHARES, layers)](
        *(caches.conv, caches.ssm, source_slot_ids, target_slot_ids),
        *(dummy_slot, rows, caches.conv.stride(0), caches.ssm.stride(0)),
        CONV_SIZE=caches.conv[0, 0].numel() if layers else 0,
        SSM_SIZE=caches.ssm[0, 0].numel() if layers else 0,
        SHARES=_SHARES, ROWS=triton.next_power_of_2(rows), TILE=_TILE, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["dummy_slot", "num_rows"])
def _copy_states_kernel(
    conv, ssm, source_ids, target_ids, dummy_slot, num_rows, conv_stride, ssm_stride,
    CONV_SIZE: tl.constexpr, SSM_SIZE: tl.constexpr, SHARES: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    share, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    targets = tl.load(target_ids + rows, rows < num_rows, other=dummy_slot)
    is_real = targets != dummy_slot
    ranks = tl.cumsum(is_real.to(tl.int32), 0)
    for rank in range(1, tl.max(ranks, 0) + 1):
        row = tl.sum(tl.where(is_real & (ranks == rank), rows, 0), 0)
        source, target = tl.load(source_ids + row), tl.load(target_ids + row)
        _copy(ssm + layer * ssm_stride, source, target, share, SSM_SIZE, SHARES, TILE)
        _copy(
            conv + layer * conv_stride, source, target, share, CONV_SIZE, SHARES, TILE
        )


@triton.jit
def _copy(
    pool, source, target, share,
    SIZE: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy this program's tiles of a slot."""
    for first in range(share * TILE, SIZE, SHARES * TILE):
        places = first + tl.arange(0, TILE)
        mask = places < SIZE
        values = tl.load(pool + source * SIZE + places, mask)
        tl.store(pool + target * SIZE + places, values, mask)
