"""The convolution of a prefill in large tiles of packed tokens.

What it was: a program took 128 or 256 tokens of 64 or 128 channels, whatever rows they
were of, from four tile sizes among which the first call chose for good.

Why it was slow: 512 tokens of 6,144 channels make 96 to 384 such programs, too few to
fill a GPU; a tile that crosses rows looks its tokens' rows up one by one; and the size
that was best for the first call need not be for the next.

What replaced it: tiles of 8 x 256 at first; here scan chunks, which never cross rows,
cut into shares of a few tokens (`optimized/kernels/conv1d.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.optimized.kernels.conv1d import _store_windows_kernel, silu
from lockstep.optimized.kernels.dtypes import wide_dtype
from lockstep.shapes import ConvBias, ConvInputs, ConvStates, ConvWeight


class Tile(NamedTuple):
    """Tokens and channels of a program, and its warps."""

    tokens: int
    channels: int
    warps: int


class Prepared(NamedTuple):
    """What all layers of a step can share, or a layer has ready.

    Attributes:
        outputs: Where results go.
        initial: Windows that rows start from, kept aside, since a row may start from a
            slot that another program writes.
        rows_of: Row of each token.
    """

    outputs: Tensor
    initial: Tensor
    rows_of: Tensor


#: The four sizes that there were, then the two that replaced them.
LARGE_TILES = Tile(128, 64, 4), Tile(128, 128, 4), Tile(256, 64, 4), Tile(256, 128, 8)
LATER_TILES = Tile(8, 256, 4), Tile(128, 128, 4)


def conv_prefill(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve in the largest of the tiles."""
    return convolve(inputs, weight, bias, conv_states, batch, LARGE_TILES[-1])


def prepare(inputs: Tensor, conv_states: Tensor, batch: BatchMetadata) -> Prepared:
    """Look up each token's row and keep initial windows aside."""
    tokens = torch.arange(len(inputs), device=inputs.device)
    return Prepared(
        inputs.new_zeros(inputs.shape),
        conv_states[batch.initial_slot_ids].mT.contiguous(),
        torch.searchsorted(batch.cu_prefill_lens[1:], tokens, right=True),
    )


def convolve(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    batch: BatchMetadata,
    tile: Tile,
    prepared: Prepared | None = None,
) -> Tensor:
    """Convolve all tokens of all rows in tiles of one size, then store all windows.

    Args:
        inputs: As of `conv_prefill`, and so all others.
        weight: Filters.
        bias: Added to each channel.
        conv_states: One layer's windows.
        batch: Names rows, slots and snapshots.
        tile: The size.
        prepared: What `prepare` made of the same arguments, if that is done already.
    """
    outputs, initial, rows_of = prepared or prepare(inputs, conv_states, batch)
    channels, window = conv_states.shape[1:]
    shape = {"CHANNELS": channels, "WINDOW": window}
    _tile_kernel[
        (triton.cdiv(len(inputs), tile.tokens), triton.cdiv(channels, tile.channels))
    ](
        *(inputs, weight, bias, initial, outputs, rows_of, batch.cu_prefill_lens),
        *(len(batch.prefill_slot_ids), inputs.stride(0)),
        **shape,
        WIDE=wide_dtype(weight),
        TILE_T=tile.tokens,
        TILE_C=tile.channels,
        num_warps=tile.warps,
    )
    rows, snapshots = len(batch.prefill_slot_ids), len(batch.snapshot_slot_ids)
    _store_windows_kernel[(triton.cdiv(channels, tile.channels), rows + snapshots)](
        *(inputs, conv_states, initial),
        *(batch.cu_prefill_lens, batch.prefill_slot_ids),
        *(batch.snapshot_rows, batch.snapshot_ends, batch.snapshot_slot_ids),
        *(rows, len(conv_states) - 1, inputs.stride(0), conv_states.stride(0)),
        **shape,
        TILE_C=tile.channels,
        num_warps=2,
    )
    return outputs


@triton.jit
def _tile_kernel(
    inputs, weight, bias, initial, outputs, rows_of, cu_lens, num_rows, input_stride,
    CHANNELS: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr,
    TILE_T: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    is_channel = channels < CHANNELS
    is_token = tokens < tl.load(cu_lens + num_rows)
    row = tl.load(rows_of + tokens, is_token, other=0)
    row_start = tl.load(cu_lens + row)
    total = tl.zeros((TILE_T, TILE_C), WIDE)
    if bias is not None:
        total += tl.load(bias + channels, is_channel, other=0.0).to(WIDE)[None]
    for lane in tl.static_range(WINDOW + 1):
        place = tokens - WINDOW + lane
        is_new = place >= row_start
        mask = is_token[:, None] & is_channel[None]
        new = tl.load(
            inputs + place[:, None] * input_stride + channels[None],
            mask & is_new[:, None],
            other=0.0,
        ).to(initial.dtype.element_ty)
        # Before the row's first token lies its initial window.
        old = row * WINDOW + WINDOW + place - row_start
        old = tl.load(
            initial + old[:, None] * CHANNELS + channels[None],
            mask & ~is_new[:, None],
            other=0.0,
        )
        tap = tl.where(is_new[:, None], new, old)
        factor = tl.load(weight + channels * (WINDOW + 1) + lane, is_channel, other=0.0)
        total += tap.to(WIDE) * factor.to(WIDE)[None]
    tl.store(
        outputs + tokens[:, None] * CHANNELS + channels[None],
        silu(total).to(outputs.dtype.element_ty),
        is_token[:, None] & is_channel[None],
    )
