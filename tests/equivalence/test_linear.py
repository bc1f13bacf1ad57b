"""The product of all tokens against that of each, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.factories import load, randn
from tests.host_reads import no_host_reads
from tests.tolerances import assert_budgeted

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COUNTS = (0, 1, 2, 3, 15, 16, 17, 37, 65)


def parameters(inputs: Tensor, outputs: int, has_bias: bool) -> list[Tensor | None]:
    """Draw a matrix and perhaps a bias for some inputs."""
    weight = randn(outputs, inputs.shape[1], seed=1, dtype=inputs.dtype)
    return [weight, randn(outputs, seed=2, dtype=inputs.dtype) if has_bias else None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("width", "outputs"), [(19, 23), (64, 5), (1, 1), (37, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_twins(
    count: int, width: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Any number of tokens of any width."""
    inputs = randn(count, width, dtype=dtype)
    given = parameters(inputs, outputs, has_bias)
    actual = load("optimized", "linear").linear(inputs, *given)
    wide = [None if part is None else part.double() for part in given]
    exact = load("reference", "linear").linear(inputs.double(), *wide)
    assert actual.dtype == dtype
    assert_budgeted("linear", actual, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_nan_harm_no_other(dtype: torch.dtype) -> None:
    """Padding may hold anything."""
    inputs = randn(21, 19, dtype=dtype)
    weight, bias = parameters(inputs, 23, has_bias=True)
    linear = load("optimized", "linear").linear
    expected = linear(inputs, weight, bias)
    is_real = torch.arange(21) % 5 != 3
    inputs[~is_real] = torch.nan
    actual = linear(inputs, weight, bias)
    assert actual[~is_real].isnan().all()
    assert_budgeted("linear", actual[is_real], expected[is_real])


def test_nothing_is_read_back() -> None:
    """The host never waits for a number from the device."""
    inputs = randn(5, 19)
    weight, bias = parameters(inputs, 23, has_bias=True)
    with no_host_reads():
        load("optimized", "linear").linear(inputs, weight, bias)
