"""Root-mean-square norms of all tokens at once.

Every rounding is where the reference has it; only the sum over features may be taken in
another order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.shapes import Features, Hidden, NormWeight


def rms_norm(hidden: Features, weight: NormWeight, eps: float) -> Features:
    """Norm all tokens.

    Cost: seven launches, whatever the number of tokens; up to three copies of the
    values in the dtype of the arithmetic are alive.
    """
    return weight * _normalize(_widen(hidden), eps).to(weight.dtype)


def add_rms_norm(
    residual: Hidden, update: Hidden, weight: NormWeight, eps: float
) -> tuple[Hidden, Hidden]:
    """Add, then norm the sum.

    Cost: one launch more than `rms_norm`.
    """
    total = residual + update
    return total, rms_norm(total, weight, eps)


def gated_group_rms_norm(
    hidden: Features, gate: Features, weight: NormWeight, eps: float, num_groups: int
) -> Features:
    """Gate all tokens, then norm all groups of all tokens.

    Cost: as `rms_norm`, and three launches for the gate.
    """
    gated = _widen(hidden) * functional.silu(_widen(gate))
    groups = gated.unflatten(1, (num_groups, -1))  # (tokens, groups, features / groups)
    normed = _normalize(groups, eps).flatten(1).to(hidden.dtype)
    return (weight * normed).to(hidden.dtype)


def _widen(values: Tensor) -> Tensor:
    """Return values in the dtype of the arithmetic."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _normalize(values: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension."""
    mean_square = values.square().mean(-1, keepdim=True)
    return values * torch.rsqrt(mean_square + eps)
