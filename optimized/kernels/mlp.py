"""Activations in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.config import Activation
from lockstep.shapes import Features, Inputs

from .dtypes import wide_dtype

#: Features that a program activates.
_FEATURES = 1024


def activate(inputs: Features, activation: Activation) -> Features:
    """Read and write each value once, in one launch."""
    return _activate(inputs, inputs.shape[1], activation, is_gated=False)


def activate_gated(inputs: Inputs, activation: Activation) -> Features:
    """Read gates and features where they stand, in one launch."""
    return _activate(inputs, inputs.shape[1] // 2, activation, is_gated=True)


def _activate(
    inputs: Tensor, width: int, activation: Activation, is_gated: bool
) -> Tensor:
    """Launch a program for each token and part of the features."""
    outputs = torch.empty(len(inputs), width, dtype=inputs.dtype, device=inputs.device)
    block = min(_FEATURES, triton.next_power_of_2(width))
    if len(inputs):
        _activate_kernel[(len(inputs), triton.cdiv(width, block))](
            inputs, outputs, width, *inputs.stride(),
            ACTIVATION=activation, IS_GATED=is_gated, WIDE=wide_dtype(inputs),
            BLOCK=block,
        )  # fmt: skip
    return outputs


@triton.jit
def apply_activation(x, ACTIVATION: tl.constexpr):
    """Apply the function to wide numbers; NaN stays NaN."""
    if ACTIVATION == "relu2":
        x = tl.where(x < 0, 0, x)
        return x * x
    elif ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _activate_kernel(
    inputs, outputs, width, token_stride, feature_stride,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Activate a part of one token."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = features < width
    places = inputs + token * token_stride + features * feature_stride
    output = apply_activation(tl.load(places, mask=mask).to(WIDE), ACTIVATION)
    if IS_GATED:
        # Rounded before it meets the features, as on the other side.
        output = output.to(inputs.dtype.element_ty).to(WIDE)
        output *= tl.load(places + width * feature_stride, mask=mask).to(WIDE)
    tl.store(outputs + token * width + features, output, mask=mask)
