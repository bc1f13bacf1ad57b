"""Mixture of experts for all tokens at once, grouped by expert in tiles of equal size.

Each pair of a token and one of its experts is a row of a product. Pairs are sorted by
expert, and each expert's fill tiles of a fixed number of rows, its last one in part.
How many tiles there are at most follows from the counts of pairs and experts, so that
shapes are known before routing; a batched product takes tiles to experts' matrices.

Cost of the tiles: each gathers its expert's matrices, which are so read twice and
written once; a grouped product would read them once for each expert. And each expert's
last tile is empty in part. Tall tiles are fewer, low ones emptier: the height is about
the number of pairs that an expert has on average, which makes three tiles an expert at
most, but no less than `_MIN_HEIGHT`, below which gathering takes most of the time.
Where there are fewer pairs than experts, as in decode, each pair is a tile of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.config import MoeConfig
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

from .mlp import activate, activate_gated

#: Keeps the sum of a token's weights away from zero when they are scaled by it.
_TINY = 1e-20

#: Rows of the lowest tiles that several pairs may share.
_MIN_HEIGHT = 16

#: Elements of expert matrices that are gathered at once, and of the rows they meet.
_MAX_GATHERED = 1 << 26


def route(
    hidden: Hidden,
    router: Weight,
    correction: PerExpert | None,
    config: MoeConfig,
    token_mask: TokenMask,
) -> tuple[ExpertIds, ExpertWeights]:
    """Choose for all tokens at once, then take back what padding has chosen.

    Cost: one product, and two stable sorts for groups and experts; some 20 launches.
    """
    scores = functional.linear(hidden.to(router.dtype), router)
    if config.scoring == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if correction is None else scores + correction
    ids = _choose(choice, config)
    weights = _weigh(scores.gather(1, ids), config)
    is_padding = ~token_mask[:, None]
    return ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0)


def apply_experts(
    hidden: Features,
    expert_ids: ExpertIds,
    expert_weights: ExpertWeights,
    experts_up: ExpertsUp,
    experts_down: ExpertsDown,
    config: MoeConfig,
) -> Features:
    """Multiply tiles by their experts' matrices and add up each token's rows.

    Cost: up to twice the operations of a product of all pairs, or `_MIN_HEIGHT` rows an
    expert more; some seven launches for each part of the tiles that `_MAX_GATHERED`
    allows. The results of all rows are alive, and one part's rows and matrices of one
    kind. To add results in order takes six launches for each of ``top_k``.
    """
    if not len(hidden):
        return torch.empty_like(hidden)
    tiles = _Tiles(expert_ids, len(experts_up))
    size = tiles.num_at_once(experts_up.shape[1], hidden.shape[1])
    results = hidden.new_empty(*tiles.tokens.shape, hidden.shape[1])
    parts = (each.split(size) for each in (results, tiles.tokens, tiles.experts))
    for part, tokens, experts in zip(*parts, strict=True):
        rows = hidden[tokens]  # (tiles, rows, width)
        part.copy_(_multiply(rows, experts, experts_up, experts_down, config))
    return _add_up(results.flatten(0, 1), tiles, expert_ids, expert_weights)


class _Tiles:
    """Where each pair of a token and an expert stands in tiles of one expert each.

    Attributes:
        experts: Expert of each tile; any, for a tile that stays empty.
        tokens: Token in each row of each tile; any, for an empty row.
        places: Row of each pair, counted over all tiles; any, for a pair of no expert.
    """

    def __init__(self, expert_ids: Tensor, num_experts: int) -> None:
        num_pairs, top_k = expert_ids.numel(), expert_ids.shape[1]
        height = _tile_height(num_pairs, num_experts)
        num_tiles = min(num_pairs, num_pairs // height + num_experts)
        device = expert_ids.device
        # Pairs of no expert stand behind those of the last.
        keys = expert_ids.flatten()
        keys, order = keys.where(keys >= 0, num_experts).sort(stable=True)
        begins = torch.searchsorted(keys, torch.arange(num_experts + 1, device=device))
        tile_ends = ((begins.diff() + height - 1) // height).cumsum(0)
        # Row of an expert's first pair, less that pair's place in the order.
        shifts = functional.pad(tile_ends, (1, 0)) * height - begins
        tiles = torch.arange(num_tiles, device=device)
        self.experts = torch.searchsorted(tile_ends, tiles, right=True)
        self.experts.clamp_(max=num_experts - 1)
        rows = torch.arange(num_tiles * height, device=device).view(num_tiles, height)
        sources = (rows - shifts[self.experts][:, None]).clamp(max=num_pairs - 1)
        self.tokens = order[sources] // top_k
        places = (torch.arange(num_pairs, device=device) + shifts[keys]).clamp(
            max=num_tiles * height - 1
        )
        self.places = torch.empty_like(order).scatter_(0, order, places)
        self.places = self.places.view_as(expert_ids)

    def num_at_once(self, inner: int, width: int) -> int:
        """Count the tiles whose matrices and rows may be in memory together."""
        height = self.tokens.shape[1]
        return max(1, _MAX_GATHERED // max(inner * width, height * (inner + width)))


def _tile_height(num_pairs: int, num_experts: int) -> int:
    """Return one, or the largest power of two up to an expert's average of pairs."""
    if num_pairs <= num_experts:
        return 1
    return max(_MIN_HEIGHT, 1 << (num_pairs // num_experts).bit_length() - 1)


def _multiply(
    rows: Tensor,
    experts: Tensor,
    experts_up: Tensor,
    experts_down: Tensor,
    config: MoeConfig,
) -> Tensor:
    """Send the rows of each tile through its expert."""
    function = activate_gated if config.gated else activate
    inner = rows @ experts_up[experts].mT
    inner = function(inner.flatten(0, 1), config.activation)
    return inner.unflatten(0, rows.shape[:2]) @ experts_down[experts].mT


def _add_up(
    results: Tensor, tiles: _Tiles, expert_ids: Tensor, weights: Tensor
) -> Tensor:
    """Add each token's results in ascending id, as the reference does."""
    total = results.new_zeros(len(weights), results.shape[1], dtype=weights.dtype)
    for choice in range(weights.shape[1]):
        part = weights[:, choice, None] * results[tiles.places[:, choice]]
        total += part.masked_fill(expert_ids[:, choice, None] < 0, 0)
    return total.to(results.dtype)


def _choose(choice: Tensor, config: MoeConfig) -> Tensor:
    """Return the ids of each token's best experts within its best groups, ascending."""
    if config.num_groups > 1:
        groups = choice.unflatten(1, (config.num_groups, -1))
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        kept = _best(group_scores, config.top_k_groups)
        outside = torch.ones_like(group_scores, dtype=torch.bool)
        outside.scatter_(1, kept, False)
        choice = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
    return _best(choice, config.top_k).sort(dim=1).values


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the places of each row's largest scores; the sort is stable."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _weigh(scores: Tensor, config: MoeConfig) -> Tensor:
    """Turn the scores of the chosen experts into weights."""
    if config.scoring == "softmax":
        scores = torch.softmax(scores, dim=-1)
    elif config.normalize_weights:
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    return scores * config.scaling
