"""How exact is exact between two engines: the numbers that the verifier compares with.

Integers are compared bit by bit. Floats of a token, a place or a slot may differ by a
relative root-mean-square error of ``budget * u``, with ``u`` the unit roundoff of the
narrowest dtype on the way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Unit roundoff of each dtype.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-9,
}

#: Largest error after one step, about four times the largest that the default scenes
#: measure between both backends (in brackets). Norms of values that nearly cancel out
#: are the worst.
BUDGETS = {
    "results": 2000.0,  # 504
    "K/V": 500.0,  # 121
    "conv windows": 240.0,  # 59
    "SSM states": 120.0,  # 30
    "log-probabilities": 200.0,  # 48
}
#: How much more may add up over a run: states forget errors about as fast as they come,
#: so that the default scenes measure hardly more (1.1).
FREE_RUNNING_FACTOR = 2.0


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return each row's root-mean-square error, relative to its values.

    A row smaller than the others is measured by them: what cancels out in it does so no
    more exactly than they are known. Equal bits are equal, NaN too.
    """
    size = len(expected), math.prod(expected.shape[1:])
    mine, theirs = (side.double().reshape(size) for side in (actual, expected))
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    error = torch.where(same, 0.0, mine - theirs).square().mean(1).sqrt()
    squares = theirs.nan_to_num(0.0, 0.0, 0.0).square().mean(1)
    scale = torch.maximum(squares, squares.mean()).sqrt().clamp(min=1e-300)
    return (error / scale).nan_to_num(nan=math.inf)
