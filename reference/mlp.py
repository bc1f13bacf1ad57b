"""Activation functions, one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.config import Activation
from lockstep.shapes import Features


def activate(inputs: Features, activation: Activation) -> Features:
    """Apply an activation function to each token's features.

    Tokens go one by one, since vectorized loops treat the last few values of an array
    by another path than the rest, and exponentials differ between the two.

    Args:
        inputs: One row a token.
        activation: ``relu2`` (the square of the positive part), ``silu`` or ``gelu``
            (the exact one, with the error function).

    Source: So et al. 2021, "Primer", arXiv 2109.08668, section 4.2 (squared ReLU).
    """
    function = _FUNCTIONS[activation]
    outputs = torch.empty_like(inputs)
    for row, output in zip(inputs, outputs, strict=True):
        output.copy_(function(torch.clone(row)))
    return outputs


def _relu2(row: Tensor) -> Tensor:
    return functional.relu(row).square()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": _relu2,
    "silu": functional.silu,
    "gelu": functional.gelu,
}
