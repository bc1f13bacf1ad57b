"""Matrix products: right, and each token's its own."""

from __future__ import annotations

import pytest
import torch

from tests.factories import at_alignment, load, randn
from tests.tolerances import assert_budgeted, assert_consistent, assert_equal

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
#: Widths on both sides of what vector registers and cache lines hold.
WIDTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 19, 31, 33, 64, 65)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_product(
    side: str, width: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Every output is a dot product plus its bias."""
    inputs = randn(5, width, dtype=dtype)
    weight = randn(23, width, seed=1, dtype=dtype)
    bias = randn(23, seed=2, dtype=dtype) if has_bias else None
    exact = torch.einsum("ti,oi->to", inputs.double(), weight.double())
    exact = exact if bias is None else exact + bias.double()
    assert_budgeted("linear", load(side, "linear").linear(inputs, weight, bias), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_company_changes_nothing(side: str, width: int, dtype: torch.dtype) -> None:
    """A token gets the same numbers alone, in a batch, and at any alignment."""
    linear = load(side, "linear").linear
    inputs, weight = randn(18, width, dtype=dtype), randn(29, width, dtype=dtype)
    together = linear(inputs, weight, None)
    for token in range(len(inputs)):
        alone = linear(inputs[token : token + 1].clone(), weight, None)
        assert_consistent(side, "linear", together[token : token + 1], alone)
        moved = linear(at_alignment(inputs[token : token + 1], token), weight, None)
        assert_consistent(side, "linear", moved, alone)


def test_columns_of_a_wider_array(side: str) -> None:
    """Inputs may be columns of a wider array, as after a split."""
    linear = load(side, "linear").linear
    wide, weight = randn(4, 50), randn(9, 21)
    expected = linear(wide[:, 8:29].contiguous(), weight, None)
    assert_consistent(side, "linear", linear(wide[:, 8:29], weight, None), expected)


def test_no_tokens(side: str) -> None:
    """A batch may be empty."""
    outputs = load(side, "linear").linear(randn(0, 7), randn(3, 7), None)
    assert_equal(outputs, torch.zeros(0, 3))
