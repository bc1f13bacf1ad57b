"""Attention of many tokens at once over gathered K/V blocks.

Queries are cut into *tiles*, each of a few tokens of one row. Which tile holds what is
found on the device; how many there are at most follows from the size of the arrays
alone. A tile gathers its row's blocks over the whole width of the block table, and what
a query may not see is masked. Decode rows are tiles of one token.

Masked values are zeroed, as masked scores are: memory that nobody wrote may hold NaN,
and zero times NaN is NaN.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.config import RotaryConfig
from lockstep.shapes import Keys, KvBlocks, Queries, TokenIds

#: Prefill tokens of a tile: each tile gathers its row's K/V anew, so not too few; a row
#: takes a whole number of tiles, so not too many.
_TILE_TOKENS = 32
#: Positions whose K/V is gathered at a time, which bounds the memory of a step however
#: long its contexts are; one tile's may be more.
_MAX_POSITIONS = 2**14


def apply_rotary(
    queries: Queries, keys: Keys, positions: TokenIds, config: RotaryConfig
) -> tuple[Queries, Keys]:
    """Turn all tokens at once.

    Frequencies are computed on the CPU, to be the same on every device, and stay on the
    device from the first call on: a captured graph must find them there.

    Cost: three launches for the angles, about ten for queries and keys each; two copies
    of either in the dtype of the arithmetic are alive.
    """
    size = config.size(queries.shape[2])
    wide = torch.promote_types(queries.dtype, torch.float32)
    frequencies = _rotary_frequencies(config, size, queries.device).to(wide)
    angles = positions[:, None, None].to(wide) * frequencies
    cos, sin = angles.cos(), angles.sin()  # (tokens, 1, pairs)
    return _turn(queries, cos, sin), _turn(keys, cos, sin)


def append_kv(
    keys: Keys,
    values: Keys,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    kv_index: TokenIds,
) -> None:
    """Scatter the K/V of all tokens.

    Which of several tokens stays in the dummy block is undefined.

    Cost: one launch for each pool, and one to round if dtypes differ.
    """
    for blocks, new in ((key_blocks, keys), (value_blocks, values)):
        blocks.view(-1, *blocks.shape[2:])[kv_index] = new.to(blocks.dtype)


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
    """Turn all tokens at once, then scatter them.

    Cost: that of both.
    """
    queries, keys = apply_rotary(queries, keys, positions, config)
    append_kv(keys, values, key_blocks, value_blocks, kv_index)
    return queries


def attend_decode(
    queries: Queries,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    scale: float,
    batch: BatchMetadata,
) -> Queries:
    """Attend from all decode rows, each a tile of one token.

    Cost: about fifteen launches for every `_MAX_POSITIONS` positions of all block
    tables, dummy blocks included; their K/V is in memory twice, once in the dtype of
    the arithmetic. Padded rows get zeros.
    """
    rows = torch.arange(len(queries), device=queries.device)
    tiles = rows, rows[:, None], batch.context_lens[: len(queries), None]
    return _attend_tiles(queries, key_blocks, value_blocks, scale, batch, tiles)


def attend_prefill(
    queries: Queries,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    scale: float,
    batch: BatchMetadata,
) -> Queries:
    """Attend from all prefill tokens, a tile of one row after another.

    Cost: as `attend_decode`, where the positions are those of every tile's whole table,
    however few of them are its row's; the scores of a tile's queries over them are in
    memory too. Padding tokens get zeros.
    """
    tiles = _prefill_tiles(len(queries), batch)
    return _attend_tiles(queries, key_blocks, value_blocks, scale, batch, tiles)


@cache
def _rotary_frequencies(
    config: RotaryConfig, size: int, device: torch.device
) -> Tensor:
    """Return the angle per position of each pair, in float32 as published models do.

    Source: for ``llama3``, the reference code of Llama 3.1 (``apply_scaling``).
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        frequencies = frequencies / config.factor
    if config.kind == "llama3":
        turns = config.original_positions / (2 * math.pi / frequencies)
        low, high = config.low_factor, config.high_factor
        share = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - share) * frequencies / config.factor + share * frequencies
    return frequencies.to(device)


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of all heads, and hand on the rest as they are."""
    size = 2 * cos.shape[2]
    first, second = heads[..., :size].to(cos.dtype).chunk(2, dim=2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    return torch.cat((turned.to(heads.dtype), heads[..., size:]), dim=2)


#: Row of each tile; token of each lane, one past the last for none; and how many
#: positions each lane sees: (tiles,), (tiles, lanes), (tiles, lanes).
_Tiles = tuple[Tensor, Tensor, Tensor]


def _prefill_tiles(num_tokens: int, batch: BatchMetadata) -> _Tiles:
    """Cut prefill rows into tiles; behind the last come tiles of empty lanes."""
    starts, lens = batch.cu_prefill_lens[:-1], batch.cu_prefill_lens.diff()
    counts = (lens + _TILE_TOKENS - 1) // _TILE_TOKENS
    ends = counts.cumsum(0)
    # Only a row's last tile may lack tokens, and none lacks all of them.
    most = min(num_tokens, num_tokens // _TILE_TOKENS + len(lens))
    tiles = torch.arange(most, device=lens.device)
    rows = torch.searchsorted(ends, tiles, right=True).clamp(max=len(lens) - 1)
    firsts = (tiles - ends[rows] + counts[rows]) * _TILE_TOKENS
    lanes = firsts[:, None] + torch.arange(_TILE_TOKENS, device=lens.device)
    is_real = lanes < lens[rows, None]
    tokens = torch.where(is_real, starts[rows, None] + lanes, num_tokens)
    visible = torch.where(is_real, batch.prefill_starts[rows, None] + lanes + 1, 0)
    return rows + batch.num_decode_tokens, tokens, visible


def _attend_tiles(
    queries: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    scale: float,
    batch: BatchMetadata,
    tiles: _Tiles,
) -> Tensor:
    """Attend from each lane of each tile, as many tiles at a time as memory allows."""
    num_tokens = len(queries)
    # Empty lanes read some token, and write behind the last.
    outputs = queries.new_zeros(num_tokens + 1, *queries.shape[1:])
    positions = batch.block_tables.shape[1] * key_blocks.shape[1]
    at_a_time = max(1, _MAX_POSITIONS // max(1, positions))
    for rows, tokens, visible in zip(
        *(part.split(at_a_time) for part in tiles), strict=True
    ):
        tables = batch.block_tables[rows]
        keys, values = key_blocks[tables], value_blocks[tables]
        lanes = queries[tokens.clamp(max=num_tokens - 1)]
        attended = _attend(
            lanes, keys.flatten(1, 2), values.flatten(1, 2), visible, scale
        )
        outputs[tokens] = attended.to(outputs.dtype)
    return outputs[:num_tokens]


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Attend from each lane to the leading positions it sees, in float32 or float64.

    Query heads that share K/V heads are rows of one product, so that K/V is not copied
    for each. A lane that sees nothing gets zeros.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    num_lanes, num_kv_heads = queries.shape[1], keys.shape[2]
    positions = torch.arange(keys.shape[1], device=keys.device)
    is_hidden = positions >= visible[..., None]  # (tiles, lanes, positions)
    is_unseen = positions >= visible.amax(1)[:, None]  # (tiles, positions)
    values = values.to(wide).masked_fill(is_unseen[..., None, None], 0)
    # (tiles, kv_heads, heads / kv_heads, lanes, head_dim)
    grouped = queries.to(wide).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ keys.to(wide).permute(0, 2, 3, 1)
    scores = scores.mul_(scale).unflatten(2, (-1, num_lanes))
    # Not infinity: the softmax of a lane that sees nothing would be NaN.
    lowest = torch.finfo(wide).min
    weights = scores.masked_fill_(is_hidden[:, None, None], lowest).softmax(-1)
    attended = weights.flatten(2, 3) @ values.transpose(1, 2)
    by_head = attended.unflatten(2, (-1, num_lanes)).permute(0, 3, 1, 2, 4)
    return by_head.reshape(queries.shape)
