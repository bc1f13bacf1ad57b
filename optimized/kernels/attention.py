"""Attention straight over the K/V blocks: nothing is gathered into memory first.

A program holds the queries that share one K/V head, one token's or those of a few
neighbours, as the rows of a matrix product, and passes over its row's positions once,
with a running maximum and sum (the online softmax of Milakov and Gimelshein 2018, arXiv
1805.02867; FlashAttention, Dao et al. 2022, arXiv 2205.14135). Products are of operands
in the model's dtype, sums in float32; float32 operands stay float32 (``ieee``).

In decode few programs would have all the positions, so each row's are split between
several, and their sums are combined in the order of the splits. How many splits there
are follows from padded shapes alone; how long each is, from the row's context.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.config import AttentionConfig, RotaryConfig
from lockstep.errors import ConfigError
from lockstep.optimized.attention import _rotary_frequencies
from lockstep.shapes import Keys, KvBlocks, Queries, TokenIds

from .dtypes import SHARED_MEMORY, TRITON_DTYPES, wide_dtype
from .exact import add_product

#: Programs of a decode step that fill the device however long one context is.
_DECODE_PROGRAMS = 1024
_MAX_SPLITS = 64

#: By bytes of an operand: positions at a time, warps, stages.
_DECODE = {2: (64, 4, 5), 4: (16, 4, 2), 8: (16, 4, 1)}
#: Likewise: query rows, positions at a time, warps, stages.
_PREFILL = {2: (128, 128, 8, 3), 4: (64, 16, 16, 2), 8: (16, 16, 4, 1)}

#: Entries of shared memory that queries and keys of a prefill have at most, and keys of
#: a decode row times its lanes.
_QUERY_ENTRIES, _KEY_ENTRIES, _DECODE_ENTRIES = 2**15, 2**14, 2**19
#: Bytes that the sums of as many queries as a program takes have at most.
_SUM_BYTES = 2**17

_LOG2_E = tl.constexpr(math.log2(math.e))


def append_kv(
    keys: Keys,
    values: Keys,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    kv_index: TokenIds,
) -> None:
    """Scatter keys and values in one launch, each read and written once."""
    _append(keys, keys, keys, values, key_blocks, value_blocks, kv_index)


def append_rotary_kv(
    queries: Queries,
    keys: Keys,
    values: Keys,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    kv_index: TokenIds,
    positions: TokenIds,
    config: RotaryConfig,
) -> Queries:
    """Turn and scatter in one launch; turned keys are nowhere but in their blocks."""
    size, turned = config.size(queries.shape[2]), queries.new_empty(queries.shape)
    wide = torch.promote_types(queries.dtype, torch.float32)
    frequencies = _rotary_frequencies(config, size, queries.device).to(wide)
    new = keys, values, key_blocks, value_blocks, kv_index
    _append(queries, turned, *new, positions, frequencies)
    return turned


def _append(
    queries: Tensor,
    turned: Tensor,
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    kv_index: Tensor,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
) -> None:
    """Scatter, a token in each program; turn first, if there are frequencies."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    if num_tokens:
        _append_kernel[(num_tokens,)](
            queries, turned, keys, values, key_blocks, value_blocks, kv_index,
            positions, frequencies, *queries.stride(), *keys.stride(),
            *values.stride(), *key_blocks.stride()[1:],
            NUM_HEADS=queries.shape[1], NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            PAIRS=0 if frequencies is None else len(frequencies),
        )  # fmt: skip


def attend_decode(
    queries: Queries,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    scale: float,
    batch: BatchMetadata,
) -> Queries:
    """Attend from each row in several programs, then combine what they found.

    Cost: each row's K/V is read once, in one launch; another combines, where there are
    splits. The splits' sums are in memory in float32. Padded rows get zeros.
    """
    num_rows, num_heads, head_dim = queries.shape
    outputs = queries.new_empty(queries.shape)
    if not num_rows:
        return outputs
    common = _common(queries, key_blocks, value_blocks)
    at_a_time, num_warps, num_stages = _DECODE[common["COMPUTE"].itemsize]
    lanes = max(16, common["GROUP_BLOCK"])
    # Wide heads leave shared memory for fewer positions.
    most = _DECODE_ENTRIES // (common["DIM_BLOCK"] * max(32, lanes))
    at_a_time = max(16, min(at_a_time, most))
    positions = batch.block_tables.shape[1] * key_blocks.shape[1]
    # A power of two that fills the device, from shapes alone.
    most = triton.cdiv(positions, at_a_time), _MAX_SPLITS
    wanted = min(*most, max(1, _DECODE_PROGRAMS // (num_rows * key_blocks.shape[2])))
    num_splits = 1 << wanted.bit_length() - 1
    wide = torch.promote_types(queries.dtype, torch.float32)
    shape = num_rows, num_heads, num_splits
    sums = queries.new_empty((*shape, head_dim), dtype=wide)
    tops, totals = (queries.new_empty(shape, dtype=wide) for _ in range(2))
    rows = (batch.context_lens, sums, tops, totals, outputs)
    _attend_split_kernel[(num_rows, key_blocks.shape[2], num_splits)](
        queries, key_blocks, value_blocks, batch.block_tables, *rows, *queries.stride(),
        *key_blocks.stride()[1:], batch.block_tables.stride(0),
        **common, SCALE=scale, NUM_SPLITS=num_splits,
        LANES=lanes, AT_A_TIME=at_a_time, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _combine_splits_kernel[(num_rows, num_heads)](
            *rows,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIM_BLOCK=common["DIM_BLOCK"],
            NUM_SPLITS=num_splits, AT_A_TIME=at_a_time,
        )  # fmt: skip
    return outputs


def attend_prefill(
    queries: Queries,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    scale: float,
    batch: BatchMetadata,
) -> Queries:
    """Attend from tiles of a few tokens of one row, all heads of a K/V head at once.

    Cost: one launch; a tile reads its row's K/V up to its last token, mostly from the
    cache that all programs share. Padding tokens are tiles of zeros, behind the rest.
    """
    num_tokens, outputs = len(queries), queries.new_empty(queries.shape)
    if not num_tokens:
        return outputs
    common = _common(queries, key_blocks, value_blocks)
    lanes, at_a_time, num_warps, num_stages = _PREFILL[common["COMPUTE"].itemsize]
    group, dims = common["GROUP_BLOCK"], common["DIM_BLOCK"]
    lanes = max(min(lanes, _QUERY_ENTRIES // dims), group)
    at_a_time = max(16, min(at_a_time, _KEY_ENTRIES // dims))
    num_rows = len(batch.cu_prefill_lens) - 1
    most_tiles = num_tokens * group // lanes + num_rows + 1
    most_tiles = min(num_tokens, most_tiles)
    _attend_tile_kernel[(most_tiles, key_blocks.shape[2])](
        queries, key_blocks, value_blocks,
        batch.block_tables[batch.num_decode_tokens :], batch.cu_prefill_lens,
        batch.prefill_starts, outputs, num_tokens, num_rows, *queries.stride(),
        *key_blocks.stride()[1:], batch.block_tables.stride(0),
        **common, SCALE=scale, ROWS_BLOCK=max(16, triton.next_power_of_2(num_rows + 1)),
        LANES=lanes, AT_A_TIME=at_a_time, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return outputs


def check_fit(config: AttentionConfig, dtype: torch.dtype) -> None:
    """Refuse heads that no tile holds.

    Raises:
        ConfigError: Heads that are too wide, or too many of a K/V head.
    """
    group = config.num_heads // config.num_kv_heads
    size = triton.next_power_of_2(config.head_dim) * max(4, dtype.itemsize)
    if size * max(64, triton.next_power_of_2(group)) > _SUM_BYTES:
        raise ConfigError(
            f"attention heads of {config.head_dim} channels, {group} to a K/V head, do "
            f"not fit the {SHARED_MEMORY} bytes of a GPU's shared memory; use "
            'kernels="torch"'
        )


def _common(
    queries: Tensor, key_blocks: Tensor, value_blocks: Tensor
) -> dict[str, Any]:
    """Collect what the kernels of both kinds of rows are compiled for."""
    # Kernels take strides once.
    assert key_blocks.stride() == value_blocks.stride()
    compute = torch.promote_types(queries.dtype, key_blocks.dtype)
    if queries.dtype != torch.float64 and compute == torch.float64:
        compute = torch.float32
    num_heads, head_dim = queries.shape[1:]
    group = num_heads // key_blocks.shape[2]
    return dict(
        NUM_HEADS=num_heads, GROUP=group, GROUP_BLOCK=triton.next_power_of_2(group),
        HEAD_DIM=head_dim, DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=key_blocks.shape[1], COMPUTE=TRITON_DTYPES[compute],
        SUMS=wide_dtype(queries),
    )  # fmt: skip


@triton.jit
def _append_kernel(
    queries, turned, keys, values, key_blocks, value_blocks, kv_index, positions,
    frequencies, query_token, query_head, query_dim, key_token, key_head, key_dim,
    value_token, value_head, value_dim, slot_stride, head_stride, dim_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Turn a token's queries and keys, and copy its K/V to their place."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_index + token) * slot_stride
    cos, sin = None, None
    if PAIRS > 0:
        pairs = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :]
        frequency = tl.load(frequencies + pairs, mask=pairs < PAIRS, other=0)
        angle = tl.load(positions + token).to(frequency.dtype) * frequency
        cos, sin = tl.cos(angle), tl.sin(angle)
        _turn(
            queries + token * query_token, query_head, query_dim,
            turned + token * NUM_HEADS * HEAD_DIM, HEAD_DIM, 1, cos, sin,
            NUM_HEADS, HEAD_DIM, PAIRS,
        )  # fmt: skip
    _turn(
        keys + token * key_token, key_head, key_dim, key_blocks + slot, head_stride,
        dim_stride, cos, sin, NUM_KV_HEADS, HEAD_DIM, PAIRS,
    )  # fmt: skip
    _turn(
        values + token * value_token, value_head, value_dim, value_blocks + slot,
        head_stride, dim_stride, None, None, NUM_KV_HEADS, HEAD_DIM, 0,
    )  # fmt: skip


@triton.jit
def _turn(
    source, source_head, source_dim, target, target_head, target_dim, cos, sin,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Turn the first pairs of a token's heads, if any, and hand on the rest."""
    heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    source += heads * source_head
    target += heads * target_head
    if PAIRS > 0:
        pairs = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :]
        mask = (heads < NUM_HEADS) & (pairs < PAIRS)
        first = tl.load(source + pairs * source_dim, mask=mask).to(cos.dtype)
        second = tl.load(source + (PAIRS + pairs) * source_dim, mask=mask).to(cos.dtype)
        # Rounded as a model's numbers are; what a pool makes of them is its own.
        dtype = source.dtype.element_ty
        place = target + pairs * target_dim
        tl.store(place, (first * cos - second * sin).to(dtype), mask)
        place += PAIRS * target_dim
        tl.store(place, (second * cos + first * sin).to(dtype), mask)
    if HEAD_DIM > 2 * PAIRS:
        rest = tl.arange(0, triton.next_power_of_2(HEAD_DIM - 2 * PAIRS))[None, :]
        rest += 2 * PAIRS
        mask = (heads < NUM_HEADS) & (rest < HEAD_DIM)
        kept = tl.load(source + rest * source_dim, mask=mask)
        tl.store(target + rest * target_dim, kept, mask=mask)


@triton.jit
def _attend(
    queries, visible, cache, begin, whole, end,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr, SUMS: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """Attend to positions that all lanes see, up to ``whole``, then to others.

    Returns:
        Weighted values, the largest score, and the sum of weights, of each lane.
    """
    lanes: tl.constexpr = queries.shape[0]
    state = (
        tl.zeros([lanes, DIM_BLOCK], SUMS),
        tl.full([lanes], float("-inf"), SUMS),
        tl.zeros([lanes], SUMS),
    )
    state = _attend_span(
        state, queries, visible, cache, begin, whole,
        HEAD_DIM, DIM_BLOCK, BLOCK_SIZE, SCALE, AT_A_TIME, True,
    )  # fmt: skip
    return _attend_span(
        state, queries, visible, cache, whole, end,
        HEAD_DIM, DIM_BLOCK, BLOCK_SIZE, SCALE, AT_A_TIME, False,
    )  # fmt: skip


@triton.jit
def _attend_span(
    state, queries, visible, cache, begin, end,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr, AT_A_TIME: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Pass over the positions of a span, which begins where `AT_A_TIME` divides it.

    Where a span is whole, every lane sees all of it, and so does every step. Else
    masked values are zeroed as scores are: memory that nobody wrote may hold NaN.
    """
    key_blocks, value_blocks, table, slot_stride, dim_stride = cache
    sums, top, total = state
    dims = tl.arange(0, DIM_BLOCK)[None, :]
    for first in range(begin, end, AT_A_TIME):
        lanes = tl.arange(0, AT_A_TIME)
        positions = first + lanes
        is_there = positions < end
        if BLOCK_SIZE % AT_A_TIME == 0:
            block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
            slots = block * BLOCK_SIZE + first % BLOCK_SIZE + lanes
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_there, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        places = slots[:, None] * slot_stride + dims * dim_stride
        mask = (dims < HEAD_DIM) if IS_WHOLE else is_there[:, None] & (dims < HEAD_DIM)
        keys = tl.load(key_blocks + places, mask=mask, other=0).to(queries.dtype)
        nothing = tl.zeros([queries.shape[0], AT_A_TIME], sums.dtype)
        scores = add_product(queries, tl.trans(keys), nothing)
        if not IS_WHOLE:
            is_seen = is_there[None, :] & (positions[None, :] < visible)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * (SCALE * _LOG2_E))
        weights = tl.exp2(scores * (SCALE * _LOG2_E) - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(value_blocks + places, mask=mask, other=0)
        weights, values = weights.to(queries.dtype), values.to(queries.dtype)
        sums = add_product(weights, values, sums * fade[:, None])
        top = new_top
    return sums, top, total


@triton.jit
def _split_len(context, NUM_SPLITS: tl.constexpr, AT_A_TIME: tl.constexpr):
    """Return how many positions a split has, the last one less."""
    return tl.cdiv(tl.cdiv(context, NUM_SPLITS), AT_A_TIME) * AT_A_TIME


@triton.jit
def _attend_split_kernel(
    queries, key_blocks, value_blocks, block_tables, context_lens, sums, tops, totals,
    outputs, query_token, query_head, query_dim, slot_stride, head_stride, dim_stride,
    table_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, SUMS: tl.constexpr, SCALE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LANES: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """Attend from the heads of one K/V head of a row to one split of its context."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + row).to(tl.int32)
    split_len = _split_len(context, NUM_SPLITS, AT_A_TIME)
    begin = split * split_len
    lanes = tl.arange(0, LANES)
    heads = kv_head * GROUP + lanes
    dims = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)
    row = row.to(tl.int64)
    target = (row * NUM_HEADS + heads)[:, None]
    if begin < context:
        places = row * query_token + heads[:, None] * query_head + dims * query_dim
        query = tl.load(queries + places, mask=mask, other=0).to(COMPUTE)
        end = tl.minimum(begin + split_len, context)
        cache = (
            key_blocks + kv_head * head_stride, value_blocks + kv_head * head_stride,
            block_tables + row * table_stride, slot_stride, dim_stride,
        )  # fmt: skip
        found, top, total = _attend(
            query, end, cache, begin, end // AT_A_TIME * AT_A_TIME, end,
            HEAD_DIM, DIM_BLOCK, BLOCK_SIZE, SCALE, SUMS, AT_A_TIME,
        )  # fmt: skip
        if NUM_SPLITS == 1:
            tl.store(outputs + target * HEAD_DIM + dims, found / total[:, None], mask)
        else:
            target = target * NUM_SPLITS + split
            tl.store(sums + target * HEAD_DIM + dims, found, mask=mask)
            tl.store(tops + target, top[:, None], mask=(lanes < GROUP)[:, None])
            tl.store(totals + target, total[:, None], mask=(lanes < GROUP)[:, None])
    elif NUM_SPLITS == 1:
        tl.store(outputs + target * HEAD_DIM + dims, 0.0, mask=mask)


@triton.jit
def _combine_splits_kernel(
    context_lens, sums, tops, totals, outputs,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """Bring the splits of one head of a row to their common maximum, and add them."""
    row = tl.program_id(0).to(tl.int64)
    context = tl.load(context_lens + row).to(tl.int32)
    head = row * NUM_HEADS + tl.program_id(1)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, DIM_BLOCK)
    is_used = splits * _split_len(context, NUM_SPLITS, AT_A_TIME) < context
    top = tl.load(tops + head * NUM_SPLITS + splits, mask=is_used, other=float("-inf"))
    fade = tl.where(is_used, tl.exp2(top - tl.max(top, 0)), 0)
    total = tl.load(totals + head * NUM_SPLITS + splits, mask=is_used, other=0)
    places = (head * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    mask = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    found = tl.load(sums + places, mask=mask, other=0)
    output = tl.sum(found * fade[:, None], 0) / tl.sum(total * fade, 0)
    output = tl.where(context > 0, output, 0)
    tl.store(outputs + head * HEAD_DIM + dims, output, mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _attend_tile_kernel(
    queries, key_blocks, value_blocks, block_tables, cu_prefill_lens, prefill_starts,
    outputs, num_tokens, num_rows, query_token, query_head, query_dim, slot_stride,
    head_stride, dim_stride, table_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, SUMS: tl.constexpr, SCALE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, LANES: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """Attend from the heads of one K/V head of a tile; padding is one row more.

    Long contexts come first: tiles are taken from the last one on.
    """
    tile_tokens: tl.constexpr = LANES // GROUP_BLOCK
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, ROWS_BLOCK)
    begins = tl.load(cu_prefill_lens + rows, mask=rows <= num_rows, other=num_tokens)
    ends = tl.load(cu_prefill_lens + rows + 1, mask=rows < num_rows, other=num_tokens)
    begins, ends = begins.to(tl.int32), ends.to(tl.int32)
    counts = tl.cdiv(ends - begins, tile_tokens)
    tile_ends = tl.cumsum(counts, 0)
    if tile < tl.sum(counts, 0):
        row = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        first = tile - tl.sum(tl.where(rows < row, counts, 0), 0)
        first *= tile_tokens
        begin = tl.sum(tl.where(rows == row, begins, 0), 0)
        num_left = tl.sum(tl.where(rows == row, ends, 0), 0) - begin - first
        is_row = row < num_rows
        start = tl.load(prefill_starts + row, mask=is_row, other=0).to(tl.int32)
        lanes = tl.arange(0, LANES)
        tokens, heads = lanes // GROUP_BLOCK, lanes % GROUP_BLOCK
        dims = tl.arange(0, DIM_BLOCK)[None, :]
        mask = ((tokens < num_left) & (heads < GROUP))[:, None] & (dims < HEAD_DIM)
        heads = (kv_head * GROUP + heads)[:, None]
        places = (begin + first + tokens).to(tl.int64)[:, None]
        source = queries + places * query_token + heads * query_head + dims * query_dim
        query = tl.load(source, mask=tl.where(is_row, mask, False), other=0).to(COMPUTE)
        visible = (start + first + tokens + 1)[:, None]
        seen = start + first + tl.minimum(tile_tokens, num_left)
        seen = tl.where(is_row, seen, 0)
        whole = tl.where(is_row, start + first + 1, 0) // AT_A_TIME * AT_A_TIME
        cache = (
            key_blocks + kv_head * head_stride, value_blocks + kv_head * head_stride,
            block_tables + row.to(tl.int64) * table_stride, slot_stride, dim_stride,
        )  # fmt: skip
        sums, _, total = _attend(
            query, visible, cache, 0, whole, seen,
            HEAD_DIM, DIM_BLOCK, BLOCK_SIZE, SCALE, SUMS, AT_A_TIME,
        )  # fmt: skip
        output = tl.where(is_row, sums / total[:, None], 0)
        target = outputs + (places * NUM_HEADS + heads) * HEAD_DIM + dims
        tl.store(target, output, mask=mask)
