"""Mixture of experts: which experts a token visits, and what they add up to.

Source: Shazeer et al. 2017, arXiv 1701.06538, eq. 2 to 5 (the layer, and the softmax of
the largest scores); DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, eq. 12 to 16
(sigmoid scores, a correction that steers the choice alone, and choice limited to the
best groups of experts).
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

from .linear import linear
from .mlp import activate, activate_gated

#: Keeps the sum of a token's weights away from zero when they are scaled by it.
_TINY = 1e-20


def route(
    hidden: Hidden,
    router: Weight,
    correction: PerExpert | None,
    config: MoeConfig,
    token_mask: TokenMask,
) -> tuple[ExpertIds, ExpertWeights]:
    """Choose the experts of each token and their weights.

    A score is a product with the router, in float32, or its sigmoid, as the model says.
    The choice goes by score, plus correction if there is one. The weights are the
    softmax of the scores of those chosen, or the plain sigmoids, scaled to a sum of one
    if the model wants that. Where scores tie, the lowest id is chosen.

    Args:
        hidden: One row a token.
        router: One row an expert, in float32.
        correction: Added to the scores for the choice, never to the weights; None for
            none.
        config: How many experts, groups and choices.
        token_mask: False for padding, which visits no expert.

    Returns:
        Expert ids of each token, ascending, with -1 for none; and their weights, in
        float32 (float64 in a float64 model).
    """
    shape = (len(hidden), config.top_k)
    ids = torch.full(shape, -1, dtype=torch.int64, device=hidden.device)
    weights = torch.zeros(shape, dtype=router.dtype, device=hidden.device)
    for token, is_real in enumerate(token_mask.tolist()):
        if is_real:
            row = hidden[token].to(router.dtype, copy=True)
            scores = functional.linear(row, router)
            if config.scoring == "sigmoid":
                scores = scores.sigmoid()
            choice = scores if correction is None else scores + correction
            ids[token] = _choose(choice, config)
            weights[token] = _weigh(scores[ids[token]], config)
    return ids, weights


def apply_experts(
    hidden: Features,
    expert_ids: ExpertIds,
    expert_weights: ExpertWeights,
    experts_up: ExpertsUp,
    experts_down: ExpertsDown,
    config: MoeConfig,
) -> Features:
    """Send each token through its experts and add up what they return, weighted.

    An expert is a matrix up, an activation, gated or not, and a matrix down. A token's
    experts are added in ascending id, in the dtype of the weights, and the sum is
    rounded once.

    Args:
        hidden: One row a token, of the width in which the experts work.
        expert_ids: Experts of each token, ascending; -1 adds nothing.
        expert_weights: Their weights.
        experts_up: First matrix of every expert, the rows of a gate first.
        experts_down: Second matrix of every expert.
        config: The activation between the two, and whether it is gated.
    """
    function = activate_gated if config.gated else activate
    outputs = torch.empty_like(hidden)
    rows = zip(hidden, expert_ids.tolist(), expert_weights, outputs, strict=True)
    for row, ids, weights, output in rows:
        total = torch.zeros_like(row, dtype=expert_weights.dtype)
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                inner = linear(row[None], experts_up[expert], None)
                inner = function(inner, config.activation)
                result = linear(inner, experts_down[expert], None)[0]
                # A weight is a single number, which would take the result's dtype.
                total += weight * result.to(total.dtype)
        output.copy_(total)
    return outputs


def _choose(choice: Tensor, config: MoeConfig) -> Tensor:
    """Return the ids of a token's best experts within its best groups, ascending."""
    groups = choice.view(config.num_groups, -1)
    if config.num_groups > 1:
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        kept = _best(group_scores, config.top_k_groups)
        outside = torch.ones_like(group_scores, dtype=torch.bool)
        outside[kept] = False
        groups = groups.masked_fill(outside[:, None], -torch.inf)
    return _best(groups.flatten(), config.top_k).sort().values


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the largest scores; the sort is stable, so low ids win."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def _weigh(scores: Tensor, config: MoeConfig) -> Tensor:
    """Turn the scores of the chosen experts into weights."""
    if config.scoring == "softmax":
        scores = torch.softmax(scores, dim=-1)
    elif config.normalize_weights:
        scores = scores / (scores.sum() + _TINY)
    return scores * config.scaling
