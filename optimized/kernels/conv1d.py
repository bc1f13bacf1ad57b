"""The causal convolution, with windows read from their slots and written to them.

In a prefill the tiles are the scan chunks, which never cross rows. The first chunk of a
row keeps the row's initial window aside; windows are written by a second kernel, from
there and from the inputs. So no window is written before all were read, whatever the
order of programs and whoever's slot a row starts from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.batch import BatchMetadata
from lockstep.shapes import ConvBias, ConvInputs, ConvStates, ConvWeight

from .dtypes import wide_dtype

#: Bytes of channels in a program, and its warps.
_DECODE_BYTES, _DECODE_WARPS = 256, 4
_PREFILL_BYTES, _PREFILL_WARPS = 1024, 2
#: Tokens that a program convolves at a time, and programs that share a chunk.
_TOKENS, _SHARES = 4, 4


def conv_decode(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve the tokens of all decode rows, and slide all windows on.

    Cost: one launch; each window is read and written once, and padded rows' are not.
    Outputs of padded rows are not written.
    """
    rows, channels = inputs.shape
    outputs = inputs.new_empty(inputs.shape)
    tile_c = _DECODE_BYTES // inputs.element_size()
    _decode_kernel[(triton.cdiv(channels, tile_c), rows)](
        *(inputs, weight, bias, conv_states, outputs, batch.decode_slot_ids),
        *(len(conv_states) - 1, inputs.stride(0), conv_states.stride(0)),
        CHANNELS=channels, WINDOW=conv_states.shape[2], WIDE=wide_dtype(weight),
        TILE_C=tile_c, num_warps=_DECODE_WARPS,
    )  # fmt: skip
    return outputs


def conv_prefill(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve all tokens of all rows, then store all windows.

    Cost: two launches; each input is read and each output written once. Outputs of
    padding tokens are not written.
    """
    channels, window = conv_states.shape[1:]
    outputs = inputs.new_empty(inputs.shape)
    rows, snapshots = len(batch.prefill_slot_ids), len(batch.snapshot_slot_ids)
    initial = conv_states.new_empty(rows, window, channels)
    size = inputs.element_size()
    tile_c = min(_PREFILL_BYTES // size, triton.next_power_of_2(channels))
    shape = {"CHANNELS": channels, "WINDOW": window}
    strides = inputs.stride(0), conv_states.stride(0)
    tiles = triton.cdiv(channels, tile_c)
    _prefill_kernel[(tiles, len(batch.scan_chunk_rows), _SHARES)](
        *(inputs, weight, bias, conv_states, outputs, initial),
        *(batch.initial_slot_ids, batch.cu_prefill_lens),
        *(batch.cu_scan_chunks, batch.scan_chunk_rows),
        *strides,
        **shape, WIDE=wide_dtype(weight), TILE_C=tile_c, TOKENS=_TOKENS, SHARES=_SHARES,
        num_warps=_PREFILL_WARPS,
    )  # fmt: skip
    tile_c = _DECODE_BYTES // size
    _store_windows_kernel[(triton.cdiv(channels, tile_c), rows + snapshots)](
        *(inputs, conv_states, initial),
        *(batch.cu_prefill_lens, batch.prefill_slot_ids),
        *(batch.snapshot_rows, batch.snapshot_ends, batch.snapshot_slot_ids),
        *(rows, len(conv_states) - 1, *strides),
        **shape, TILE_C=tile_c, num_warps=2,
    )  # fmt: skip
    return outputs


@triton.jit(do_not_specialize=["dummy_slot"])
def _decode_kernel(
    inputs, weight, bias, states, outputs, slot_ids, dummy_slot, input_stride,
    slot_stride,
    CHANNELS: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr,
    TILE_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ids + row)
    if slot == dummy_slot:
        return
    channels = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    mask = channels < CHANNELS
    newest = tl.load(inputs + row * input_stride + channels, mask, other=0.0)
    window = states + slot * slot_stride + channels * WINDOW
    taps = ()
    for lane in tl.static_range(WINDOW):
        taps += (tl.load(window + lane, mask, other=0.0),)
    taps += (newest.to(states.dtype.element_ty),)
    # A thread may write what another one reads.
    tl.debug_barrier()
    for lane in tl.static_range(WINDOW):
        tl.store(window + lane, taps[lane + 1], mask)
    total = tl.zeros((TILE_C,), WIDE)
    for lane in tl.static_range(WINDOW + 1):
        factor = tl.load(weight + channels * (WINDOW + 1) + lane, mask, other=0.0)
        total += taps[lane].to(WIDE) * factor.to(WIDE)
    if bias is not None:
        total += tl.load(bias + channels, mask, other=0.0).to(WIDE)
    activated = silu(total).to(outputs.dtype.element_ty)
    tl.store(outputs + row * CHANNELS + channels, activated, mask)


_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def silu(x):
    """Return ``x * sigmoid(x)``, by the power that takes the fewest instructions."""
    return x / (1 + tl.exp2(x * -_LOG2E))


@triton.jit
def _prefill_kernel(
    inputs, weight, bias, states, outputs, initial, initial_ids, cu_lens, cu_chunks,
    chunk_rows, input_stride, slot_stride,
    CHANNELS: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr,
    TILE_C: tl.constexpr, TOKENS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    chunk, share = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_chunks + chunk), tl.load(cu_chunks + chunk + 1)
    # Shares of a few tokens side by side, so that no loop is long.
    size = tl.cdiv(tl.cdiv(end - begin, SHARES), TOKENS) * TOKENS
    first = begin + share * size
    end = tl.minimum(end, first + size)
    if first >= end:
        return
    row = tl.load(chunk_rows + chunk)
    row_start = tl.load(cu_lens + row)
    channels = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    is_channel = channels < CHANNELS
    window = states + tl.load(initial_ids + row) * slot_stride + channels * WINDOW
    if first == row_start:
        for lane in tl.static_range(WINDOW):
            tap = tl.load(window + lane, is_channel)
            place = (row * WINDOW + lane) * CHANNELS
            tl.store(initial + place + channels, tap, is_channel)
    factors = ()
    for lane in tl.static_range(WINDOW + 1):
        factor = tl.load(weight + channels * (WINDOW + 1) + lane, is_channel, other=0.0)
        factors += (factor.to(WIDE),)
    offset = tl.zeros((TILE_C,), WIDE)
    if bias is not None:
        offset = tl.load(bias + channels, is_channel, other=0.0).to(WIDE)
    inputs += channels
    outputs += channels
    for token in range(first, end, TOKENS):
        taps = ()
        for lane in tl.static_range(WINDOW):
            # Before the row's first token lies its initial window.
            place = token - WINDOW + lane
            mask = tl.where(place >= row_start, is_channel, False)
            tap = tl.load(inputs + place * input_stride, mask, other=0.0)
            tap = tap.to(states.dtype.element_ty)
            if place < row_start:
                tap = tl.load(window + (token - row_start + lane), is_channel)
            taps += (tap,)
        for ahead in tl.static_range(TOKENS):
            mask = tl.where(token + ahead < end, is_channel, False)
            tap = tl.load(inputs + (token + ahead) * input_stride, mask, other=0.0)
            taps += (tap.to(states.dtype.element_ty),)
        for ahead in tl.static_range(TOKENS):
            total = offset
            for lane in tl.static_range(WINDOW + 1):
                total += taps[ahead + lane].to(WIDE) * factors[lane]
            activated = silu(total).to(outputs.dtype.element_ty)
            mask = tl.where(token + ahead < end, is_channel, False)
            tl.store(outputs + (token + ahead) * CHANNELS, activated, mask)


@triton.jit(do_not_specialize=["num_rows", "dummy_slot"])
def _store_windows_kernel(
    inputs, states, initial, cu_lens, slot_ids, snapshot_rows, snapshot_ends,
    snapshot_slot_ids, num_rows, dummy_slot, input_stride, slot_stride,
    CHANNELS: tl.constexpr, WINDOW: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(1)
    if target < num_rows:
        row = target.to(tl.int64)
        slot, end = tl.load(slot_ids + row), tl.load(cu_lens + row + 1)
    else:
        row = tl.load(snapshot_rows + target - num_rows)
        slot = tl.load(snapshot_slot_ids + target - num_rows)
        end = tl.load(snapshot_ends + target - num_rows)
    if slot == dummy_slot:
        return
    channels = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    is_channel = channels < CHANNELS
    row_start = tl.load(cu_lens + row)
    for lane in tl.static_range(WINDOW):
        place = end - WINDOW + lane
        if place >= row_start:
            tap = tl.load(inputs + place * input_stride + channels, is_channel)
            tap = tap.to(states.dtype.element_ty)
        else:
            place = row * WINDOW + WINDOW + place - row_start
            tap = tl.load(initial + place * CHANNELS + channels, is_channel)
        window = states + slot * slot_stride + channels * WINDOW
        tl.store(window + lane, tap, is_channel)
