"""Attention over the K/V blocks of each request, token by token.

Most hybrid models have no position encoding: the order of tokens reaches attention
through the Mamba layers, and here only by which positions a token may see. Others turn
queries and keys by an angle that grows with the position.

Source: Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, eq. 1;
Ainslie et al. 2023, "GQA", arXiv 2305.13245 (query heads that share K/V heads).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.blocks import num_blocks_for
from lockstep.config import RotaryConfig
from lockstep.shapes import Keys, KvBlocks, Queries, TokenIds

from .rows import prefill_rows


def apply_rotary(
    queries: Queries, keys: Keys, positions: TokenIds, config: RotaryConfig
) -> tuple[Queries, Keys]:
    """Turn pairs of channels of every head by angles that grow with the position.

    The product of two such heads depends on how far apart they are. Channel ``i`` of
    the first half of those turned pairs with channel ``i`` of the second half. Angles,
    cosines and sines are computed for each token on its own, from its position, in
    float32 (float64 in a float64 model), and what is turned is rounded once.

    Args:
        queries: Queries of every token of the step.
        keys: Keys of every token of the step.
        positions: Absolute position of each token.
        config: How fast each pair turns, and what part of a head.

    Returns:
        Queries and keys, turned; channels beyond that part are as they were.

    Source: Su et al. 2021, "RoFormer", arXiv 2104.09864, eq. 15 and 34.
    """
    size = config.size(queries.shape[2])
    wide = torch.promote_types(queries.dtype, torch.float32)
    frequencies = _rotary_frequencies(config, size).to(queries.device, wide)
    turned = queries.clone(), keys.clone()
    for token, position in enumerate(positions.tolist()):
        angles = position * frequencies
        cos, sin = angles.cos(), angles.sin()
        for heads in turned:
            first, second = heads[token, :, :size].to(wide).chunk(2, dim=1)
            heads[token, :, :size] = torch.cat(
                (first * cos - second * sin, second * cos + first * sin), dim=1
            )
    return turned


def append_kv(
    keys: Keys,
    values: Keys,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    kv_index: TokenIds,
) -> None:
    """Write the keys and values of new tokens to their places in the blocks.

    Args:
        keys: Keys of every token of the step.
        values: Values of every token of the step.
        key_blocks: One layer's keys; written, in the pool's dtype.
        value_blocks: One layer's values; written likewise.
        kv_index: Place of each token, ``block_id * block_size + block_offset``. Tokens
            whose K/V exists already, or that are padding, point into the dummy block.
    """
    for token, index in enumerate(kv_index.tolist()):
        block_id, block_offset = divmod(index, key_blocks.shape[1])
        key_blocks[block_id, block_offset] = keys[token]
        value_blocks[block_id, block_offset] = values[token]


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
    """Turn queries and keys, and write keys and values to their places.

    Args:
        queries: As of `apply_rotary`.
        keys: As of both.
        values: As of `append_kv`, and so are the next three.
        key_blocks: One layer's keys; written.
        value_blocks: One layer's values; written.
        kv_index: Place of each token.
        positions: As of `apply_rotary`.
        config: Likewise.

    Returns:
        Queries, turned.
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
    """Attend from the one new token of each decode row to all of its context.

    Args:
        queries: Queries of the decode tokens.
        key_blocks: One layer's keys, those of this step included.
        value_blocks: One layer's values.
        scale: Factor on the scores.
        batch: Block tables and context lengths; the first rows are the decode rows.

    Returns:
        The weighted values of each query head, in the queries' dtype.
    """
    outputs = torch.empty_like(queries)
    lengths = batch.context_lens[: len(queries)].tolist()
    for index, length in enumerate(lengths):
        keys = _gather(key_blocks, batch.block_tables[index], length)
        values = _gather(value_blocks, batch.block_tables[index], length)
        outputs[index] = _attend(queries[index], keys, values, scale)
    return outputs


def attend_prefill(
    queries: Queries,
    key_blocks: KvBlocks,
    value_blocks: KvBlocks,
    scale: float,
    batch: BatchMetadata,
) -> Queries:
    """Attend from each prefill token to the positions up to its own.

    The positions before the row's first are found in the blocks, wherever they were
    computed: in an earlier slice, or by another request with the same prefix.

    Args:
        queries: Queries of the prefill tokens.
        key_blocks: One layer's keys, those of this step included.
        value_blocks: One layer's values.
        scale: Factor on the scores.
        batch: Names rows, their positions and their blocks.

    Returns:
        The weighted values of each query head, in the queries' dtype.
    """
    outputs = torch.empty_like(queries)
    for row in prefill_rows(batch):
        context_len = row.position + row.end - row.start
        keys = _gather(key_blocks, row.block_table, context_len)
        values = _gather(value_blocks, row.block_table, context_len)
        for index in range(row.start, row.end):
            # What lies past a token's own position may be unwritten: it is not read.
            length = row.position + index - row.start + 1
            outputs[index] = _attend(
                queries[index], keys[:length], values[:length], scale
            )
    return outputs


def _rotary_frequencies(config: RotaryConfig, size: int) -> Tensor:
    """Return the angle per position of each pair, in float32 as published models do.

    Source: for ``llama3``, the reference code of Llama 3.1 (``apply_scaling``).
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "default":
        return frequencies
    turns = config.original_positions / (2 * math.pi / frequencies)
    low, high = config.low_factor, config.high_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / config.factor + share * frequencies


def _gather(blocks: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Copy the first positions of a request out of its blocks, in order."""
    block_ids = block_table[: num_blocks_for(length, blocks.shape[1])]
    return blocks[block_ids].flatten(0, 1)[:length]  # (length, kv_heads, head_dim)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend from one token to all keys given, in float32 or float64."""
    wide = torch.promote_types(query.dtype, torch.float32)
    num_heads, head_dim = query.shape
    grouped = query.to(wide, copy=True).view(keys.shape[1], -1, head_dim)
    # (kv_heads, heads / kv_heads, length)
    scores = grouped @ keys.to(wide).permute(1, 2, 0) * scale
    weights = torch.softmax(scores, dim=-1)
    return (weights @ values.to(wide).transpose(0, 1)).view(num_heads, head_dim)
