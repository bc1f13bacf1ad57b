"""Experts as two grouped products over pairs of a token and an expert.

Pairs are put in order of their experts, by counting: a pair's place is the number of
pairs of lower experts, and of earlier ones of its own. Each expert's pairs are cut into
tiles of a few rows. A product's program multiplies one tile by a part of its expert's
matrix, which is read where it is, and rows are gathered as they are read.

Few pairs want low tiles, so that hardly any row is empty, and each expert's matrix is
read once, at the speed of memory; many want tall ones, for arithmetic. Which, follows
from the counts of pairs and experts alone. No sum depends on which program comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lockstep.config import MoeConfig
from lockstep.optimized.moe import _TINY
from lockstep.shapes import (
    ExpertIds,
    ExpertsDown,
    ExpertsUp,
    ExpertWeights,
    Features,
    Hidden,
    PerExpert,
    TokenMask,
    Weight,
)

from .dtypes import TRITON_DTYPES, wide_dtype
from .exact import add_product, exact_divide, exact_exp
from .mlp import apply_activation

#: Pairs that are counted at a time.
_COUNTED = 2048
#: Features that a program adds up.
_ADDED = 1024


#: Tiles whose programs follow each other.
_GROUP = 12


class _Tile(NamedTuple):
    """How a product is cut: rows, columns and inputs of a tile, and how it is run."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int


#: By bytes of an operand; the first that is a quarter taller than an expert has pairs
#: on average, or the last.
_TILES = {
    2: (
        _Tile(16, 64, 128, 4, 4), _Tile(32, 64, 128, 4, 4), _Tile(128, 256, 64, 8, 4),
    ),
    4: (_Tile(16, 64, 32, 4, 3), _Tile(32, 64, 32, 4, 3), _Tile(64, 64, 16, 8, 3)),
    8: (_Tile(16, 32, 16, 4, 1), _Tile(32, 32, 16, 4, 1)),
}  # fmt: skip


def route(
    hidden: Hidden,
    router: Weight,
    correction: PerExpert | None,
    config: MoeConfig,
    token_mask: TokenMask,
) -> tuple[ExpertIds, ExpertWeights]:
    """Choose and weigh in one launch after the product, which is a library's.

    So scores are the twin's, bit for bit, and near ties break as they do there.
    """
    scores = functional.linear(hidden.to(router.dtype), router)
    weights = scores.new_empty(len(hidden), config.top_k)
    ids = torch.empty_like(weights, dtype=torch.int64)
    group_size = config.num_experts // config.num_groups
    if len(hidden):
        _route_kernel[(len(hidden),)](
            scores, correction, token_mask, ids, weights,
            SCALING=config.scaling, TINY=_TINY, SCORING=config.scoring,
            IS_NORMALIZED=config.normalize_weights, TOP_K=config.top_k,
            NUM_GROUPS=config.num_groups, TOP_K_GROUPS=config.top_k_groups,
            GROUP_SIZE=group_size,
            GROUPS_BLOCK=triton.next_power_of_2(config.num_groups),
            GROUP_BLOCK=triton.next_power_of_2(group_size), num_warps=1,
        )  # fmt: skip
    return ids, weights


def apply_experts(
    hidden: Features,
    expert_ids: ExpertIds,
    expert_weights: ExpertWeights,
    experts_up: ExpertsUp,
    experts_down: ExpertsDown,
    config: MoeConfig,
) -> Features:
    """Sort pairs, multiply up and activate, multiply down, add up each token's rows.

    Cost: four launches. Every visited expert's matrices are read about once. Results of
    all pairs are in memory between launches, in the dtype of the model.
    """
    num_tokens, width = hidden.shape
    outputs = hidden.new_empty(num_tokens, width)
    if not num_tokens:
        return outputs
    num_pairs, top_k = expert_ids.numel(), expert_ids.shape[1]
    num_experts, inner_size = experts_down.shape[0], experts_down.shape[2]
    tile = _choose_tile(num_pairs, num_experts, hidden.dtype)
    most_tiles = min(num_pairs, num_pairs // tile.rows + num_experts)
    pairs = _sort(expert_ids, num_experts, tile.rows, most_tiles)
    inner = hidden.new_empty(num_pairs, inner_size)
    results = hidden.new_empty(num_pairs, width)
    activation = config.activation
    _multiply(hidden, experts_up, inner, pairs, tile, top_k, activation, config.gated)
    _multiply(inner, experts_down, results, pairs, tile, 0, None, False)
    columns = min(_ADDED, triton.next_power_of_2(width))
    _add_kernel[(num_tokens, triton.cdiv(width, columns))](
        results, expert_ids, expert_weights, pairs.places, outputs, width,
        *expert_ids.stride(), *expert_weights.stride(),
        TOP_K=top_k, BLOCK=columns,
    )  # fmt: skip
    return outputs


class _Pairs(NamedTuple):
    """Pairs in the order of their experts.

    Attributes:
        order: Pair in each row.
        places: Row of each pair; any, for a pair of no expert.
        tiles: Expert, first row and end of the rows of each tile; -1 for no expert.
    """

    order: Tensor
    places: Tensor
    tiles: Tensor


def _choose_tile(num_pairs: int, num_experts: int, dtype: torch.dtype) -> _Tile:
    """Choose from padded shapes alone."""
    tiles = _TILES[dtype.itemsize]
    low = (tile for tile in tiles if tile.rows * num_experts * 4 >= num_pairs * 5)
    return next(low, tiles[-1])


def _sort(
    expert_ids: Tensor, num_experts: int, tile_rows: int, most_tiles: int
) -> _Pairs:
    """Give each expert a program, which counts all pairs and places its own."""
    num_pairs, device = expert_ids.numel(), expert_ids.device
    order, places = torch.empty(2, num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(most_tiles, 3, dtype=torch.int32, device=device)
    _sort_kernel[(num_experts,)](
        expert_ids.reshape(-1), order, places, tiles, num_pairs, most_tiles,
        NUM_EXPERTS=num_experts, TILE_ROWS=tile_rows,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=min(_COUNTED, max(16, triton.next_power_of_2(num_pairs))),
    )  # fmt: skip
    return _Pairs(order, places, tiles)


def _multiply(
    inputs: Tensor,
    matrices: Tensor,
    outputs: Tensor,
    pairs: _Pairs,
    tile: _Tile,
    top_k: int,
    activation: str | None,
    is_gated: bool,
) -> None:
    """Multiply the rows of all tiles by their experts' matrices.

    Args:
        inputs: A row for each token, where ``top_k`` is given; else for each pair.
        matrices: Of every expert.
        outputs: A row for each pair.
        pairs: What the tiles hold.
        tile: How they are cut.
        top_k: Pairs of a token.
        activation: Function of the products, if any.
        is_gated: Whether the first half of a matrix makes gates for the second.
    """
    num_tiles, num_columns = len(pairs.tiles), outputs.shape[1]
    # Gates take as many registers again.
    columns = max(16, tile.columns // 2) if is_gated else tile.columns
    _product_kernel[(num_tiles * triton.cdiv(num_columns, columns),)](
        inputs, matrices, outputs, pairs.order, pairs.tiles, num_tiles, num_columns,
        *inputs.stride(), *matrices.stride(),
        NUM_INPUTS=inputs.shape[1], TOP_K=top_k, ACTIVATION=activation,
        IS_GATED=is_gated, SUMS=wide_dtype(inputs), OPERAND=TRITON_DTYPES[inputs.dtype],
        ROWS=tile.rows, COLUMNS=columns, INPUTS=tile.inputs, GROUP=_GROUP,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def _take_best(choice, index):
    """Return the place of the largest number, the lowest of several; -inf it there."""
    top = tl.max(tl.max(choice, 1), 0)
    place = tl.where(choice == top, index, 2**30)
    place = tl.min(tl.min(place, 1), 0)
    return place, tl.where(index == place, float("-inf"), choice)


@triton.jit
def _route_kernel(
    scores, correction, token_mask, ids, weights,
    SCALING: tl.constexpr, TINY: tl.constexpr, SCORING: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_K_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a token: groups are rows, their experts columns."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS_BLOCK)[:, None]
    members = tl.arange(0, GROUP_BLOCK)[None, :]
    experts = groups * GROUP_SIZE + members
    is_expert = (groups < NUM_GROUPS) & (members < GROUP_SIZE)
    is_real = tl.load(token_mask + token)
    place = scores + token * NUM_GROUPS * GROUP_SIZE + experts
    score = tl.load(place, mask=tl.where(is_real, is_expert, False), other=0)
    if SCORING == "sigmoid":
        score = exact_divide(score * 0 + 1, 1 + exact_exp(-score))
    choice = score
    if correction is not None:
        choice += tl.load(correction + experts, mask=is_expert, other=0)
    # A sort puts NaN first; a maximum would pass it over.
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(is_expert, choice, float("-inf"))
    experts = tl.where(is_expert, experts, 2**30)
    if NUM_GROUPS > 1:
        best = tl.max(choice, 1)
        place = tl.min(tl.where(choice == best[:, None], experts, 2**30), 1)
        second = tl.where(experts == place[:, None], float("-inf"), choice)
        left = (best + tl.max(second, 1))[:, None]
        left = tl.where(groups < NUM_GROUPS, left, float("-inf"))
        is_kept = groups < 0
        for _ in tl.static_range(TOP_K_GROUPS):
            group, left = _take_best(left, groups)
            is_kept |= groups == group
        choice = tl.where(is_kept, choice, float("-inf"))
    is_chosen = experts < 0
    for _ in tl.static_range(TOP_K):
        expert, choice = _take_best(choice, experts)
        is_chosen |= experts == expert
    if SCORING == "softmax":
        top = tl.max(tl.max(tl.where(is_chosen, score, float("-inf")), 1), 0)
        score = exact_exp(score - top)
    total = tl.sum(tl.sum(tl.where(is_chosen, score, 0), 1), 0)
    weight = score
    if SCORING == "softmax":
        weight = score / total
    elif IS_NORMALIZED:
        weight = score / (total + TINY)
    weight = tl.where(is_real, weight * SCALING, 0)
    # Experts before each, of its own group and of those before.
    chosen = is_chosen.to(tl.int32)
    in_group = tl.sum(chosen, 1)
    rank = tl.cumsum(chosen, 1) + (tl.cumsum(in_group, 0) - in_group)[:, None] - 1
    tl.store(ids + token * TOP_K + rank, tl.where(is_real, experts, -1), is_chosen)
    tl.store(weights + token * TOP_K + rank, weight, is_chosen)


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def _sort_kernel(
    expert_ids, order, places, tiles, num_pairs, most_tiles,
    NUM_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the pairs of all experts, then place those of one, in their order."""
    expert = tl.program_id(0)
    lanes, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + lanes
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
        # Pairs of no expert have a bin of their own.
        counts += tl.histogram(tl.where(ids < 0, NUM_EXPERTS, ids).to(tl.int32), BINS)
    counts = tl.where(bins < NUM_EXPERTS, counts, 0)
    num_tiles = tl.cdiv(counts, TILE_ROWS)
    begin = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = begin + tl.sum(tl.where(bins == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, num_tiles, 0), 0)
    for index in range(0, tl.cdiv(end - begin, TILE_ROWS)):
        tile = tiles + (first_tile + index) * 3
        tl.store(tile, expert)
        tl.store(tile + 1, begin + index * TILE_ROWS)
        tl.store(tile + 2, end)
    for unused in range(tl.sum(num_tiles, 0) + expert, most_tiles, NUM_EXPERTS):
        tl.store(tiles + unused * 3, -1)
    place = begin
    for first in range(0, num_pairs, BLOCK):
        pair = first + lanes
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
        is_mine = (ids == expert).to(tl.int32)
        row = place + tl.cumsum(is_mine, 0) - 1
        tl.store(order + row, pair, mask=is_mine > 0)
        tl.store(places + pair, row, mask=is_mine > 0)
        place += tl.sum(is_mine, 0)


@triton.jit(do_not_specialize=["num_tiles"])
def _product_kernel(
    inputs, matrices, outputs, order, tiles, num_tiles, num_columns, row_stride,
    input_stride, expert_stride, matrix_row, matrix_column,
    NUM_INPUTS: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr, SUMS: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply one tile by some rows of its expert's matrix.

    Programs of a few tiles, often of the same expert, follow each other with all parts
    of its matrix, so that rows and matrices both stay in the cache meanwhile.
    """
    program, num_parts = tl.program_id(0), tl.cdiv(num_columns, COLUMNS)
    first_tile = program // (GROUP * num_parts) * GROUP
    num_grouped = tl.minimum(num_tiles - first_tile, GROUP)
    program %= GROUP * num_parts
    tile, part = first_tile + program % num_grouped, program // num_grouped
    expert = tl.load(tiles + tile * 3)
    if expert >= 0:
        rows = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
        is_row = rows < tl.load(tiles + tile * 3 + 2)
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < num_columns
        # What stands for missing columns is computed, and not stored.
        sources = tl.where(is_row, rows, 0)
        if TOP_K > 0:
            sources = tl.load(order + rows, mask=is_row, other=0) // TOP_K
        steps = tl.arange(0, INPUTS)[None, :]
        source = inputs + sources.to(tl.int64)[:, None] * row_stride
        source += steps * input_stride
        matrix = matrices + expert.to(tl.int64) * expert_stride
        matrix += tl.where(is_column, columns, 0).to(tl.int64)[:, None] * matrix_row
        matrix += steps * matrix_column
        features = matrix + tl.cast(num_columns, tl.int64) * matrix_row
        sums = tl.zeros([ROWS, COLUMNS], SUMS)
        more_sums = tl.zeros([ROWS, COLUMNS], SUMS)
        for first in range(0, NUM_INPUTS, INPUTS):
            mask = None if NUM_INPUTS % INPUTS == 0 else steps < NUM_INPUTS - first
            other = None if NUM_INPUTS % INPUTS == 0 else 0
            is_there = is_row[:, None] if mask is None else is_row[:, None] & mask
            operand = tl.load(source, mask=is_there, other=0)
            part_of = tl.load(matrix, mask=mask, other=other).to(OPERAND)
            sums = add_product(operand, tl.trans(part_of), sums)
            if IS_GATED:
                part_of = tl.load(features, mask=mask, other=other).to(OPERAND)
                more_sums = add_product(operand, tl.trans(part_of), more_sums)
            source += INPUTS * input_stride
            matrix += INPUTS * matrix_column
            features += INPUTS * matrix_column
        if IS_GATED:
            sums = apply_activation(sums, ACTIVATION) * more_sums
        elif ACTIVATION is not None:
            sums = apply_activation(sums, ACTIVATION)
        target = outputs + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(target, sums, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_kernel(
    results, expert_ids, expert_weights, places, outputs, width, id_token, id_choice,
    weight_token, weight_choice,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a token's results in ascending id; what no expert made counts for nothing."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    total = tl.zeros([BLOCK], expert_weights.dtype.element_ty)
    for choice in tl.static_range(TOP_K):
        is_there = tl.load(expert_ids + token * id_token + choice * id_choice) >= 0
        row = tl.load(places + token * TOP_K + choice, mask=is_there, other=0)
        weight = tl.load(expert_weights + token * weight_token + choice * weight_choice)
        mask = tl.where(is_there, is_column, False)
        row = row.to(tl.int64) * width
        result = tl.load(results + row + columns, mask=mask, other=0).to(total.dtype)
        total += tl.where(is_there, weight * result, 0)
    tl.store(outputs + token * width + columns, total, mask=is_column)
