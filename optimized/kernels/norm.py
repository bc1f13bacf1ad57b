"""Root-mean-square norms in one pass: a program holds whole rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.shapes import Features, Hidden, NormWeight

from .conv1d import silu
from .dtypes import wide_dtype

#: Values that a program holds, unless a row has more.
_TILE = 2048


def rms_norm(hidden: Features, weight: NormWeight, eps: float) -> Features:
    """Norm all tokens.

    Cost: one launch; each value is read and written once.
    """
    normed = hidden.new_empty(hidden.shape, dtype=weight.dtype)
    _launch_rms_norm(hidden, None, None, weight, normed, eps)
    return normed


def add_rms_norm(
    residual: Hidden, update: Hidden, weight: NormWeight, eps: float
) -> tuple[Hidden, Hidden]:
    """Add, then norm the sum.

    Cost: one launch; two values are read and two written for each.
    """
    dtype = torch.promote_types(residual.dtype, update.dtype)
    total = residual.new_empty(residual.shape, dtype=dtype)
    normed = residual.new_empty(residual.shape, dtype=weight.dtype)
    _launch_rms_norm(residual, update, total, weight, normed, eps)
    return total, normed


def gated_group_rms_norm(
    hidden: Features, gate: Features, weight: NormWeight, eps: float, num_groups: int
) -> Features:
    """Gate all tokens, then norm all groups of all tokens.

    Cost: one launch; two values are read and one written for each.
    """
    normed = hidden.new_empty(hidden.shape)
    features = hidden.shape[1] // num_groups
    tile_f = triton.next_power_of_2(features)
    tile_g = min(triton.next_power_of_2(num_groups), max(1, 2 * _TILE // tile_f))
    grid = len(hidden), triton.cdiv(num_groups, tile_g)
    _gated_group_rms_norm_kernel[grid](
        *(hidden, gate, weight, normed, hidden.stride(0), gate.stride(0)),
        GROUPS=num_groups,
        FEATURES=features,
        EPS=eps,
        WIDE=wide_dtype(hidden, gate, weight),
        TILE_G=tile_g,
        TILE_F=tile_f,
        num_warps=_num_warps(tile_g * tile_f),
    )
    return normed


def _launch_rms_norm(
    hidden: Tensor,
    update: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    eps: float,
) -> None:
    """Norm rows, or the sums of rows and their updates."""
    rows, width = hidden.shape
    tile_f = triton.next_power_of_2(width)
    tile_r = max(1, _TILE // tile_f)
    _rms_norm_kernel[(triton.cdiv(rows, tile_r),)](
        *(hidden, update, total, weight, normed, rows, hidden.stride(0)),
        0 if update is None else update.stride(0),
        WIDTH=width,
        EPS=eps,
        WIDE=wide_dtype(hidden, weight, hidden if update is None else update),
        TILE_R=tile_r,
        TILE_F=tile_f,
        num_warps=_num_warps(tile_r * tile_f),
    )


def _num_warps(values: int) -> int:
    """Give each thread eight values or more."""
    return max(1, min(16, values // 512))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    hidden, update, total, weight, normed, num_rows, hidden_stride, update_stride,
    WIDTH: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr, TILE_R: tl.constexpr,
    TILE_F: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    features = tl.arange(0, TILE_F)
    is_row, is_feature = (rows < num_rows)[:, None], (features < WIDTH)[None, :]
    mask = is_row & is_feature
    places = rows[:, None] * WIDTH + features[None, :]
    values = tl.load(
        hidden + rows[:, None] * hidden_stride + features[None, :], mask, other=0.0
    ).to(WIDE)
    if update is not None:
        added = tl.load(
            update + rows[:, None] * update_stride + features[None, :], mask, other=0.0
        )
        # What is normed is what is stored, after its rounding.
        rounded = (values + added.to(WIDE)).to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask)
        values = rounded.to(WIDE)
    factors = tl.load(weight + features, features < WIDTH, other=0.0)
    mean_square = tl.sum(values * values, 1) / WIDTH
    scaled = values * tl.rsqrt(mean_square + EPS)[:, None]
    scaled = scaled.to(factors.dtype).to(WIDE) * factors.to(WIDE)[None, :]
    tl.store(normed + places, scaled.to(factors.dtype), mask)


@triton.jit
def _gated_group_rms_norm_kernel(
    hidden, gate, weight, normed, hidden_stride, gate_stride,
    GROUPS: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr,
    TILE_G: tl.constexpr, TILE_F: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * TILE_G + tl.arange(0, TILE_G)
    features = tl.arange(0, TILE_F)
    mask = (groups < GROUPS)[:, None] & (features < FEATURES)[None, :]
    places = groups[:, None] * FEATURES + features[None, :]
    gates = tl.load(gate + token * gate_stride + places, mask, other=0.0).to(WIDE)
    values = tl.load(hidden + token * hidden_stride + places, mask, other=0.0)
    gated = values.to(WIDE) * silu(gates)
    mean_square = tl.sum(gated * gated, 1) / FEATURES
    scaled = gated * tl.rsqrt(mean_square + EPS)[:, None]
    factors = tl.load(weight + places, mask, other=0.0)
    scaled = scaled.to(values.dtype).to(WIDE) * factors.to(WIDE)
    places += token * GROUPS * FEATURES
    tl.store(normed + places, scaled.to(values.dtype), mask)
