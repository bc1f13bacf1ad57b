"""Matrix products, one token at a time."""

from __future__ import annotations

import torch
from torch.nn import functional

from lockstep.shapes import Bias, Inputs, Outputs, Weight


def linear(inputs: Inputs, weight: Weight, bias: Bias | None) -> Outputs:
    """Multiply each token's features by a matrix, and add a bias.

    A product of many rows adds up in another order than a product of one, so a token's
    result would depend on its company; here every token is multiplied alone. Each is
    copied to fresh memory first, since libraries also choose their order by alignment.

    Args:
        inputs: One row a token; there may be none.
        weight: The matrix, one row an output.
        bias: Added to every token; None for none.

    Returns:
        One row a token, in the inputs' dtype; bfloat16 products are added up in float32
        and rounded once.
    """
    outputs = inputs.new_empty(len(inputs), len(weight))
    for row, output in zip(inputs, outputs, strict=True):
        output.copy_(functional.linear(torch.clone(row), weight, bias))
    return outputs
