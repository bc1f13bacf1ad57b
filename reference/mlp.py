"""Activation functions, one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.config import Activation
from lockstep.shapes import Features, Inputs


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


def activate_gated(inputs: Inputs, activation: Activation) -> Features:
    """Multiply each token's features by the activation of their gates.

    The activation is rounded to the inputs' dtype before it meets the features, as the
    published models do.

    Args:
        inputs: One row a token: all gates, then as many features.
        activation: As in `activate`.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202, eq. 5.
    """
    gates, features = inputs.chunk(2, dim=1)
    return activate(gates, activation) * features


def _relu2(row: Tensor) -> Tensor:
    return functional.relu(row).square()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": _relu2,
    "silu": functional.silu,
    "gelu": functional.gelu,
}
