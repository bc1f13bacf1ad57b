"""Root-mean-square norms, one token at a time.

All arithmetic is float32 (float64 in a float64 model); the normed values are rounded to
the weight's dtype, which is the model's, before they meet it, as the published models
do.

Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization",
arXiv 1910.07467, eq. 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.shapes import Features, Hidden, NormWeight


def rms_norm(hidden: Features, weight: NormWeight, eps: float) -> Features:
    """Scale each token to a root mean square of one, then by a weight per feature.

    Args:
        hidden: One row a token.
        weight: Factor on each feature.
        eps: Added to the mean square, so that a row of zeros stays zeros.
    """
    outputs = torch.empty_like(hidden, dtype=weight.dtype)
    for row, output in zip(hidden, outputs, strict=True):
        output.copy_(weight * _normalize(_widen(row), eps).to(weight.dtype))
    return outputs


def add_rms_norm(
    residual: Hidden, update: Hidden, weight: NormWeight, eps: float
) -> tuple[Hidden, Hidden]:
    """Add a layer's output to the residual stream and norm the sum for the next layer.

    The two belong together because a fast version reads and writes each value once.
    One addition rounds the same alone and in company, so all tokens are added at once.

    Args:
        residual: The stream before the layer.
        update: What the layer computed.
        weight: Weight of the next layer's norm.
        eps: As in `rms_norm`.

    Returns:
        The stream after the layer, in the dtype of the stream, and its norm, in that
        of the weight.
    """
    total = residual + update
    return total, rms_norm(total, weight, eps)


def gated_group_rms_norm(
    hidden: Features, gate: Features, weight: NormWeight, eps: float, num_groups: int
) -> Features:
    """Multiply by the SiLU of a gate, then norm each group of features on its own.

    This stands at the end of a Mamba-2 layer. Groups are those of B and C, so that
    heads which share them share a scale, or all features are one; the gate comes before
    the norm.

    Args:
        hidden: Outputs of the scan, one row a token.
        gate: Gate of each feature, before the SiLU.
        weight: Factor on each feature.
        eps: Added to the mean square of a group.
        num_groups: Equal groups into which the features are cut.

    Source: Dao & Gu 2024, "Transformers are SSDs", arXiv 2405.21060, section 7.1.
    """
    outputs = torch.empty_like(hidden)
    for row, row_gate, output in zip(hidden, gate, outputs, strict=True):
        gated = _widen(row) * functional.silu(_widen(row_gate))
        groups = gated.view(num_groups, -1)  # (groups, features / groups)
        output.copy_(weight * _normalize(groups, eps).flatten().to(hidden.dtype))
    return outputs


def _widen(row: Tensor) -> Tensor:
    """Copy a row to fresh memory, in the dtype of the arithmetic."""
    return row.to(torch.promote_types(row.dtype, torch.float32), copy=True)


def _normalize(values: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension."""
    mean_square = values.square().mean(-1, keepdim=True)
    return values * torch.rsqrt(mean_square + eps)
