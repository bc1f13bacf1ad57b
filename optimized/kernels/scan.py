"""The selective scan: one pass over states in decode, chunks of lanes in prefill.

A prefill takes three kernels. The first settles what decays: how much of each token is
left at the end of its tile, and of each tile at the end of it. The second walks through
the chunks of a row, a part of a head's state in registers: it hands the state on as the
pool would hold it, writes it where it is wanted, and leaves each chunk the state that
it starts from. The third computes the outputs of all chunks at once. No program waits
for another, and nothing is added up by two.

Sums of ``dt * A`` are taken in float64, in powers of two. Where all is in the dtype of
the arithmetic, they are kept as two numbers, whose differences do not cancel; where
products round far more anyway, one number is enough, and holds the time step too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig
from lockstep.errors import ConfigError
from lockstep.memory import SCAN_CHUNK_SIZES
from lockstep.parameters import MambaParameters
from lockstep.shapes import ScanInputs, SsmStates

from .dtypes import SHARED_MEMORY, wide_dtype


class _Tiles(NamedTuple):
    """How a prefill is cut, at most.

    Attributes:
        dims: Channels of a head in a program that passes states.
        states: State columns there.
        lanes: Lanes that enter a state at a time.
        pass_warps: Warps of that program.
        pass_stages: Tiles of lanes whose loads are under way at once.
        out_lanes: Lanes of a chunk in a program that computes outputs; 64 of a chunk
            that has more.
        out_heads: Heads of a group in that program; fewer where programs are few.
        depth: State columns that one of its products adds up; fewer of wide heads.
        warps: Warps of that program.
        stages: Heads whose loads are under way at once; two where a chunk is cut, and
            fewer of wide heads.
    """

    dims: int
    states: int
    lanes: int
    pass_warps: int
    pass_stages: int
    out_lanes: int
    out_heads: int
    depth: int
    warps: int
    stages: int


#: By bytes of an operand of the matrix products. Products of float32 take no matrix
#: units, and their operands whole rows of registers.
_TILES = {
    2: _Tiles(64, 64, 128, 8, 3, 128, 8, 256, 8, 3),
    4: _Tiles(32, 32, 32, 4, 2, 32, 4, 16, 8, 1),
    8: _Tiles(16, 32, 16, 4, 2, 16, 4, 32, 8, 1),
}

#: Programs that leave part of a GPU without work.
_FEW_PROGRAMS = 128

#: Lanes, over all its heads, that a program settles.
_SETTLED_LANES = 512

#: Channels of a head that a program of a decode step holds, and its warps.
_DECODE_DIMS, _DECODE_WARPS = 8, 2


def scan_decode(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Advance the states of all decode rows, each in its slot.

    Cost: one launch; each state is read and written once, and padded rows' are not.
    Outputs of padded rows are not written.
    """
    x, dt, B, C = tokens
    y = x.new_empty(x.shape)
    tile = min(_DECODE_DIMS, triton.next_power_of_2(config.head_dim))
    tiles = triton.cdiv(config.head_dim, tile)
    columns = triton.next_power_of_2(config.state_size)
    low, high = config.time_step_limit
    _decode_kernel[(tiles * config.num_heads, len(x))](
        *(x, dt, B, C, y),
        *(parameters.A, parameters.dt_bias, parameters.D),
        *(ssm_states, batch.decode_slot_ids, len(ssm_states) - 1),
        *(x.stride(0), dt.stride(0), B.stride(0), C.stride(0), ssm_states.stride(0)),
        LOW=low, HIGH=high, **_shape(config), WIDE=wide_dtype(x), TILE_P=tile,
        TILE_N=columns, num_warps=_DECODE_WARPS,
        # Lanes of one entry each would fuse their own product into the sum that all of
        # them come to, and round it apart.
        enable_fp_fusion=x.element_size() < 8 and tile * columns > 32 * _DECODE_WARPS,
    )  # fmt: skip
    return y


def scan_prefill(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Pass states through all chunks, then compute the outputs of all at once.

    A chunk ends at one snapshot at most. A row starts from its own live slot or from
    one that the step does not write.

    Cost: three launches. Besides inputs, outputs and stored states, one state for each
    chunk is written and read, in the dtype of x. Outputs of padding tokens are not
    written.

    Raises:
        ConfigError: A scan chunk of which there is no tile.
    """
    size, heads, dim = config.scan_chunk_size, config.num_heads, config.head_dim
    if size not in SCAN_CHUNK_SIZES:
        raise ConfigError(f"scan_chunk_size is {size}; kernels have {SCAN_CHUNK_SIZES}")
    settled = _settle(tokens, parameters, config, len(ssm_states) - 1, batch)
    chunks = len(batch.scan_chunk_rows)
    starts = tokens.x.new_empty(chunks, heads, dim, config.state_size)
    _pass_states(tokens, config, ssm_states, batch, settled, starts)
    return _compute_outputs(tokens, parameters, config, batch, settled, starts)


class _Settled(NamedTuple):
    """What decays, and where states go.

    Attributes:
        lanes: For each head and token: time step, sum of steps from the chunk's first
            lane, what its rounding left, weight at the end of the token's tile. Where
            operands are narrower than the arithmetic, the first is the sum less the
            logarithm of the time step, and the third is not there.
        decays: What is left of a state after each tile of each chunk, by head.
        slots: Where the state after each chunk is stored; -1 for nowhere.
    """

    lanes: Tensor
    decays: Tensor
    slots: Tensor


def _settle(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    dummy_slot: int,
    batch: BatchMetadata,
) -> _Settled:
    """Settle all chunks."""
    x, dt = tokens.x, tokens.dt
    size, heads = config.scan_chunk_size, config.num_heads
    chunks = len(batch.scan_chunk_rows)
    tile_t = min(_TILES[x.element_size()].lanes, size)
    tile_h = min(_SETTLED_LANES // size, triton.next_power_of_2(heads))
    wide = torch.promote_types(x.dtype, torch.float32)
    settled = _Settled(
        x.new_empty(heads, 4, len(x), dtype=wide),
        x.new_empty(chunks * (size // tile_t), heads, dtype=wide),
        batch.scan_chunk_rows.new_empty(chunks),
    )
    snapshots = len(batch.snapshot_slot_ids)
    low, high = config.time_step_limit
    _settle_kernel[(triton.cdiv(heads, tile_h), chunks)](
        dt,
        *settled,
        *(parameters.A, parameters.dt_bias),
        *(batch.cu_prefill_lens, batch.prefill_starts),
        *(batch.cu_scan_chunks, batch.scan_chunk_rows),
        *(batch.snapshot_scan_chunks, batch.snapshot_slot_ids),
        *(len(x), snapshots, dummy_slot, dt.stride(0)),
        LOW=low, HIGH=high, HEADS=heads, SIZE=size,
        SNAPSHOTS=max(16, triton.next_power_of_2(snapshots)), WIDE=wide_dtype(x),
        IS_EXACT=x.dtype == wide, TILE_T=tile_t, TILE_H=tile_h,
        # No more lanes than entries, or several would write each.
        num_warps=max(1, min(4, size * tile_h // 128)),
        # As in decode: lanes agree on what they add up.
        enable_fp_fusion=False,
    )  # fmt: skip
    return settled


def _pass_states(
    tokens: ScanTokens,
    config: MambaConfig,
    ssm_states: Tensor,
    batch: BatchMetadata,
    settled: _Settled,
    starts: Tensor,
) -> None:
    """Fill ``starts``, and write the slots."""
    x, B = tokens.x, tokens.B
    tiles = _TILES[x.element_size()]
    tile_p = _tile(config.head_dim, tiles.dims)
    tile_n = _tile(config.state_size, tiles.states)
    tiles_n = triton.cdiv(config.state_size, tile_n)
    each = tiles_n * triton.cdiv(config.head_dim, tile_p)
    _pass_states_kernel[(each * config.num_heads, len(batch.prefill_slot_ids))](
        *(x, B, starts),
        *settled,
        ssm_states,
        *(batch.cu_prefill_lens, batch.prefill_starts, batch.last_scan_chunks),
        *(batch.prefill_slot_ids, batch.initial_slot_ids),
        len(x),
        *(x.stride(0), B.stride(0), ssm_states.stride(0)),
        **_shape(config), SIZE=config.scan_chunk_size, WIDE=wide_dtype(x),
        TILES_N=tiles_n, TILE_T=min(tiles.lanes, config.scan_chunk_size), TILE_P=tile_p,
        TILE_N=tile_n, num_warps=tiles.pass_warps, num_stages=tiles.pass_stages,
    )  # fmt: skip


def _compute_outputs(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    batch: BatchMetadata,
    settled: _Settled,
    starts: Tensor,
) -> Tensor:
    """Return y, from the states that the chunks start from."""
    x, _, B, C = tokens
    y = x.new_empty(x.shape)
    tiles = _TILES[x.element_size()]
    size = config.scan_chunk_size
    tile_t, tile_n, stages = _fit(config, x.element_size())
    tile_h = math.gcd(config.num_heads // config.num_groups, tiles.out_heads)
    whole = size // tile_t * config.num_heads * len(batch.scan_chunk_rows)
    # Heads share what they read alike, but each is computed in the same way.
    while tile_h > 2 and tile_h % 2 == 0 and whole // tile_h < _FEW_PROGRAMS:
        tile_h //= 2
    parts = size // tile_t * (config.num_heads // tile_h)
    _outputs_kernel[(parts, len(batch.scan_chunk_rows))](
        *(x, B, C, y, starts, settled.lanes),
        *(parameters.D, batch.cu_scan_chunks, len(x)),
        *(x.stride(0), B.stride(0), C.stride(0)),
        **_shape(config), SIZE=size, WIDE=wide_dtype(x),
        IS_EXACT=x.dtype == settled.lanes.dtype, TILE_H=tile_h, TILE_T=tile_t,
        TILE_P=_tile(config.head_dim), TILE_N=tile_n, num_warps=tiles.warps,
        num_stages=stages,
    )  # fmt: skip
    return y


def check_fit(config: MambaConfig, dtype: torch.dtype) -> None:
    """Refuse heads that no tile holds.

    Raises:
        ConfigError: Heads or states that are too wide.
    """
    _fit(config, dtype.itemsize)


def _fit(config: MambaConfig, itemsize: int) -> tuple[int, int, int]:
    """Choose lanes, state columns and stages of a program that computes outputs.

    Wide heads leave shared memory for fewer stages, then for fewer columns.

    Raises:
        ConfigError: Heads or states that are too wide.
    """
    tiles, size = _TILES[itemsize], config.scan_chunk_size
    tile_t = size if size <= tiles.out_lanes else min(64, tiles.out_lanes)
    tile_n = _tile(config.state_size, tiles.depth)
    room = SHARED_MEMORY // itemsize
    while _held(config, tile_t, tile_n, itemsize) > room:
        tile_n //= 2
        if tile_n < 16:
            raise ConfigError(
                f"Mamba heads of {config.head_dim} channels and {config.state_size} "
                f"state columns do not fit the {SHARED_MEMORY} bytes of a GPU's shared "
                'memory; use kernels="torch"'
            )
    tile_p = _tile(config.head_dim)
    columns = triton.cdiv(config.state_size, tile_n) * tile_n
    if size > tile_t:
        two = tile_p * (tile_t + 2 * columns) + tile_t * (3 * columns + 2 * tile_t)
        return tile_t, tile_n, min(tiles.stages, 1 + (two <= room))
    each = tile_p * (tile_t + columns) + tile_t * (columns if columns > tile_n else 0)
    stages = min(tiles.stages, (room - tile_t * tile_n) // each)
    return tile_t, tile_n, max(1, stages)


def _held(config: MambaConfig, tile_t: int, tile_n: int, itemsize: int) -> int:
    """Count what one stage of such a program holds in shared memory."""
    tile_p = _tile(config.head_dim)
    if itemsize == 2:
        return tile_p * (tile_t + tile_n) + tile_t * tile_n
    # Without matrix units, also weights, all of C, and states once more.
    columns = triton.cdiv(config.state_size, tile_n) * tile_n
    return tile_p * (tile_t + 2 * tile_n) + tile_t * (tile_t + columns)


def _shape(config: MambaConfig) -> dict[str, int]:
    """Name the sizes that kernels are compiled for."""
    return dict(
        HEADS=config.num_heads, HEADS_PER_GROUP=config.num_heads // config.num_groups,
        DIM=config.head_dim, STATE=config.state_size,
    )  # fmt: skip


def _tile(size: int, most: int | None = None) -> int:
    """Cover a size by a power of two that matrix products take."""
    whole = max(16, triton.next_power_of_2(size))
    return whole if most is None else min(most, whole)


@triton.jit
def _time_steps(dt, bias, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the time step: softplus, and clamped."""
    raw = dt + bias
    grown = tl.exp(tl.where(raw > 20, 20, raw))
    above = 1 + grown
    # log(1 + grown), in which what the sum lost is made good.
    logarithm = tl.log(above) * (grown / tl.where(above == 1, 1, above - 1))
    softplus = tl.where(above == 1, grown, logarithm)
    settled = tl.where(raw > 20, raw, softplus)
    settled = tl.where(settled < LOW, LOW, settled)
    return tl.where(settled > HIGH, HIGH, settled)


@triton.jit(do_not_specialize=["dummy_slot"])
def _decode_kernel(
    x, dt, B, C, y, A, dt_bias, D, states, slot_ids, dummy_slot, x_stride, dt_stride,
    B_stride, C_stride, slot_stride,
    LOW: tl.constexpr, HIGH: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    WIDE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ids + row)
    if slot == dummy_slot:
        return
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dims, columns = tile * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    is_dim, is_column = dims < DIM, columns < STATE
    mask = is_dim[:, None] & is_column[None, :]
    places = (head * DIM + dims)[:, None] * STATE + columns[None, :]
    state_ptrs = states + slot * slot_stride + places
    state = tl.load(state_ptrs, mask, other=0.0).to(WIDE)
    step = tl.load(dt + row * dt_stride + head).to(WIDE)
    step = _time_steps(step, tl.load(dt_bias + head).to(WIDE), LOW, HIGH)
    decay = tl.exp(step * tl.load(A + head).to(WIDE))
    channel = head * DIM + dims
    inputs = tl.load(x + row * x_stride + channel, is_dim, other=0.0).to(WIDE)
    place = head // HEADS_PER_GROUP * STATE + columns
    into = tl.load(B + row * B_stride + place, is_column, other=0.0).to(WIDE)
    out = tl.load(C + row * C_stride + place, is_column, other=0.0).to(WIDE)
    state = decay * state + (step * inputs)[:, None] * into[None, :]
    tl.store(state_ptrs, state.to(states.dtype.element_ty), mask)
    outputs = tl.sum(state * out[None, :], 1) + tl.load(D + head).to(WIDE) * inputs
    outputs = outputs.to(y.dtype.element_ty)
    tl.store(y + row * HEADS * DIM + channel, outputs, is_dim)


_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens", "num_snapshots", "dummy_slot"])
def _settle_kernel(
    dt, lanes, decays, slots, A, dt_bias, cu_lens, row_positions, cu_chunks, chunk_rows,
    snapshot_chunks, snapshot_slot_ids, num_tokens, num_snapshots, dummy_slot,
    dt_stride,
    LOW: tl.constexpr, HIGH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    SNAPSHOTS: tl.constexpr, WIDE: tl.constexpr, IS_EXACT: tl.constexpr,
    TILE_T: tl.constexpr, TILE_H: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    begin, end = tl.load(cu_chunks + chunk), tl.load(cu_chunks + chunk + 1)
    if begin == end:
        return
    if tl.program_id(0) == 0:
        entries = tl.arange(0, SNAPSHOTS)
        is_entry = entries < num_snapshots
        ends = tl.load(snapshot_chunks + entries, is_entry, other=-1)
        found = tl.load(snapshot_slot_ids + entries, is_entry, other=-1)
        is_here = (ends == chunk) & (found != dummy_slot)
        tl.store(slots + chunk, tl.max(tl.where(is_here, found, -1), 0))
    row = tl.load(chunk_rows + chunk)
    position = tl.load(row_positions + row) + begin - tl.load(cu_lens + row)
    # Lanes stand for absolute positions: the first chunk of a row may begin within.
    lead = (position % SIZE).to(tl.int32)
    lane = tl.arange(0, SIZE)
    heads = tl.program_id(0) * TILE_H + tl.arange(0, TILE_H)
    is_head = (heads < HEADS)[None, :]
    mask = ((lane >= lead) & (lane < lead + end - begin))[:, None] & is_head
    first = begin - lead
    raw = tl.load(
        dt + first * dt_stride + lane[:, None] * dt_stride + heads[None, :], mask
    )
    bias = tl.load(dt_bias + heads, heads < HEADS, other=0.0).to(WIDE)
    rate = tl.load(A + heads, heads < HEADS, other=0.0).to(WIDE)
    steps = tl.where(mask, _time_steps(raw.to(WIDE), bias[None, :], LOW, HIGH), 0)
    powers = (steps * rate[None, :]).to(tl.float64) * _LOG2E
    sums = tl.cumsum(powers, 0)
    tiles = tl.arange(0, SIZE // TILE_T)
    by_tile: tl.constexpr = (SIZE // TILE_T, TILE_T, TILE_H)
    totals = tl.sum(tl.reshape(powers, by_tile), 1)
    place = (chunk * (SIZE // TILE_T) + tiles)[:, None] * HEADS + heads[None, :]
    tl.store(decays + place, tl.exp2(totals.to(WIDE)), is_head)
    tiled = tl.reshape(sums, by_tile)
    is_last = (tl.arange(0, TILE_T) == TILE_T - 1)[None, :, None]
    ends = tl.sum(tl.where(is_last, tiled, 0), 1)
    left = tl.reshape(ends[:, None, :] - tiled, (SIZE, TILE_H)).to(WIDE)
    rounded = sums.to(WIDE)
    lanes += heads[None, :].to(tl.int64) * 4 * num_tokens + first + lane[:, None]
    tl.store(lanes + num_tokens, rounded, mask)
    tl.store(lanes + 3 * num_tokens, steps * tl.exp2(left), mask)
    if IS_EXACT:
        rest = (sums - rounded.to(tl.float64)).to(WIDE)
        tl.store(lanes + 2 * num_tokens, rest, mask)
        tl.store(lanes, steps, mask)
    else:
        tl.store(lanes, rounded - tl.log2(steps), mask)


@triton.jit
def _across(rows, columns, IS_WHOLE: tl.constexpr):
    """Mask a tile; its columns only where some are missing."""
    if IS_WHOLE:
        return rows[:, None]
    else:
        return rows[:, None] & columns[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def _pass_states_kernel(
    x, B, starts, lanes, decays, chunk_slots, states, cu_lens, row_positions,
    last_chunks, slot_ids, initial_ids, num_tokens, x_stride, B_stride, slot_stride,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, DIM: tl.constexpr,
    STATE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, TILES_N: tl.constexpr,
    TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    begin, end = tl.load(cu_lens + row), tl.load(cu_lens + row + 1)
    if begin == end:
        return
    head, part = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dims = part // TILES_N * TILE_P + tl.arange(0, TILE_P)
    columns = part % TILES_N * TILE_N + tl.arange(0, TILE_N)
    is_dim, is_column = dims < DIM, columns < STATE
    ARE_DIMS: tl.constexpr = DIM % TILE_P == 0
    ARE_COLUMNS: tl.constexpr = STATE % TILE_N == 0
    mask = is_dim[:, None] & is_column[None, :]
    places = (head * DIM + dims)[:, None] * STATE + columns[None, :]
    initial = states + tl.load(initial_ids + row) * slot_stride
    carry = tl.load(initial + places, mask, other=0.0).to(WIDE)
    chunk = tl.load(last_chunks + row - 1, row > 0, other=-1) + 1
    # Tiles lie at absolute positions, as chunks do.
    lead = (tl.load(row_positions + row) % SIZE).to(tl.int32)
    TILES: tl.constexpr = SIZE // TILE_T
    tile = lead // TILE_T
    num_tiles = ((end - begin + lead + TILE_T - 1) // TILE_T).to(tl.int32)
    lane = tl.arange(0, TILE_T)
    x += head * DIM + dims[None, :] + lane[:, None] * x_stride
    B += head // HEADS_PER_GROUP * STATE + columns[None, :] + lane[:, None] * B_stride
    lanes += (head.to(tl.int64) * 4 + 3) * num_tokens + lane
    decays += chunk * TILES * HEADS + head
    first = begin - lead + tile * TILE_T
    is_lane = (lane >= begin - first) & (lane < end - first)
    weights = tl.load(lanes + first, is_lane, other=0.0)
    decay = tl.load(decays + tile * HEADS)
    for index in range(tile, num_tiles):
        inputs = tl.load(
            x + first * x_stride, _across(is_lane, is_dim, ARE_DIMS), other=0.0
        )
        into = tl.load(
            B + first * B_stride, _across(is_lane, is_column, ARE_COLUMNS), other=0.0
        )
        at = chunk + index // TILES
        slot = tl.load(chunk_slots + at)
        if (index == tile) | (index % TILES == 0):
            start = starts + at * HEADS * DIM * STATE + places
            tl.store(start, carry.to(starts.dtype.element_ty), mask)
        taken_in = tl.trans((inputs.to(WIDE) * weights[:, None]).to(inputs.dtype))
        carry *= decay
        # What the next tile waits for is on its way meanwhile.
        first += TILE_T
        is_lane = lane < end - first
        weights = tl.load(lanes + first, is_lane, other=0.0)
        decay = tl.load(decays + (index + 1) * HEADS, index + 1 < num_tiles, other=0.0)
        carry = _multiply(taken_in, into, carry, WIDE)
        if (index == num_tiles - 1) | ((index + 1) % TILES == 0):
            # As the pool holds it: a slice resumed here goes on with the same.
            rounded = carry.to(states.dtype.element_ty)
            carry = rounded.to(WIDE)
            if slot >= 0:
                tl.store(states + slot * slot_stride + places, rounded, mask)
    live = states + tl.load(slot_ids + row) * slot_stride
    tl.store(live + places, carry.to(states.dtype.element_ty), mask)


@triton.jit
def _multiply(left, right, total, WIDE: tl.constexpr):
    """Add a matrix product to a total, without fewer bits than the operands have."""
    return tl.dot(left, right, total, input_precision="ieee", out_dtype=WIDE)


@triton.jit(do_not_specialize=["num_tokens"])
def _outputs_kernel(
    x, B, C, y, starts, lanes, D, cu_chunks, num_tokens, x_stride, B_stride, C_stride,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, DIM: tl.constexpr,
    STATE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, IS_EXACT: tl.constexpr,
    TILE_H: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    first_head = part % (HEADS // TILE_H) * TILE_H
    top = part // (HEADS // TILE_H) * TILE_T
    begin = tl.load(cu_chunks + chunk)
    count = (tl.load(cu_chunks + chunk + 1) - begin).to(tl.int32)
    if top >= count:
        return
    dims, columns = tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    lane = tl.arange(0, TILE_T)
    is_dim, is_to = dims < DIM, lane < count - top
    ARE_DIMS: tl.constexpr = DIM == TILE_P
    ARE_COLUMNS: tl.constexpr = STATE % TILE_N == 0
    group = first_head // HEADS_PER_GROUP * STATE
    B += begin * B_stride + group + columns[:, None] + lane[None, :] * B_stride
    C += (begin + top) * C_stride + group + lane[:, None] * C_stride + columns[None, :]
    x += begin * x_stride + dims[None, :] + lane[:, None] * x_stride
    y += (begin + top) * HEADS * DIM + dims[None, :] + lane[:, None] * (HEADS * DIM)
    starts += chunk * HEADS * DIM * STATE + dims[None, :] * STATE + columns[:, None]
    # How much each lane reads of each is the same for all heads of a group.
    read = _read(B, C, top, is_to, is_to, columns, B_stride, STATE, WIDE, TILE_T)
    out = tl.load(C, _across(is_to, columns < STATE, ARE_COLUMNS), other=0.0)
    lanes += first_head.to(tl.int64) * 4 * num_tokens + begin + lane
    mask = _across(is_to, is_dim, ARE_DIMS)
    for head in range(first_head, first_head + TILE_H):
        sums = lanes + (head - first_head) * 4 * num_tokens
        # Rows without a token read nothing, and need no mask for it.
        to_sums = tl.load(sums + num_tokens + top, is_to, other=float("-inf"))
        to_rest = tl.zeros((TILE_T,), WIDE)
        if IS_EXACT:
            to_rest = tl.load(sums + 2 * num_tokens + top, is_to, other=0.0)
        inputs = tl.load(x + top * x_stride + head * DIM, mask, other=0.0)
        total = tl.zeros((TILE_T, TILE_P), WIDE)
        for depth in tl.static_range(0, STATE, TILE_N):
            is_column = depth + columns < STATE
            if STATE > TILE_N:
                from_c = _across(is_to, is_column, ARE_COLUMNS)
                out = tl.load(C + depth, from_c, other=0.0)
            start = tl.load(
                starts + head * DIM * STATE + depth,
                _across(is_column, is_dim, ARE_DIMS),
                other=0.0,
            )
            total = _multiply(out, start, total, WIDE)
        total *= tl.exp2(to_sums)[:, None]
        if SIZE > TILE_T:
            for low in range(0, top, TILE_T):
                is_come = lane < count - low
                come = _across(is_come, is_dim, ARE_DIMS)
                entered = tl.load(x + low * x_stride + head * DIM, come, other=0.0)
                before = _read(
                    B, C, low, is_to, is_come, columns, B_stride, STATE, WIDE, TILE_T
                )
                decays, steps = _decays(
                    sums + low, to_sums, to_rest, is_come, num_tokens, IS_EXACT
                )
                weights = before * steps * tl.exp2(decays)
                total = _multiply(weights.to(inputs.dtype), entered, total, WIDE)
        decays, steps = _decays(
            sums + top, to_sums, to_rest, is_to, num_tokens, IS_EXACT
        )
        decays = tl.where(lane[:, None] >= lane[None, :], decays, float("-inf"))
        weights = read * steps * tl.exp2(decays)
        total = _multiply(weights.to(inputs.dtype), inputs, total, WIDE)
        total += tl.load(D + head).to(WIDE) * inputs.to(WIDE)
        tl.store(y + head * DIM, total.to(y.dtype.element_ty), mask)


@triton.jit
def _read(
    B, C, low, is_to, is_come, columns, B_stride,
    STATE: tl.constexpr, WIDE: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """Multiply C of some lanes and B of others, from ``low`` on."""
    TILE_N: tl.constexpr = columns.shape[0]
    total = tl.zeros((TILE_T, TILE_T), WIDE)
    for depth in tl.static_range(0, STATE, TILE_N):
        is_column = depth + columns < STATE
        out = tl.load(C + depth, is_to[:, None] & is_column[None, :], other=0.0)
        mask = is_column[:, None] & is_come[None, :]
        into = tl.load(B + depth + low * B_stride, mask, other=0.0)
        total = _multiply(out, into, total, WIDE)
    return total


@triton.jit
def _decays(sums, to_sums, to_rest, is_come, num_tokens, IS_EXACT: tl.constexpr):
    """Return the logarithm of what is left of each lane, and a factor on it."""
    if IS_EXACT:
        come_sums = tl.load(sums + num_tokens, is_come, other=0.0)
        rest = tl.load(sums + 2 * num_tokens, is_come, other=0.0)
        steps = tl.load(sums, is_come, other=0.0)[None, :]
        decays = to_sums[:, None] - come_sums[None, :]
        return decays + (to_rest[:, None] - rest[None, :]), steps
    else:
        entered = tl.load(sums, is_come, other=float("inf"))
        return to_sums[:, None] - entered[None, :], 1.0
