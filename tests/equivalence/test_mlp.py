"""Activations of all tokens against those of each, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.factories import load, randn
from tests.host_reads import no_host_reads
from tests.tolerances import assert_budgeted, assert_same_order

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ACTIVATIONS = ("relu2", "silu", "gelu")
FUNCTIONS = ("activate", "activate_gated")
COUNTS = (0, 1, 2, 3, 15, 16, 17, 37)


def run(side: str, function: str, inputs: Tensor, activation: str) -> Tensor:
    """Call a side's function."""
    return getattr(load(side, "mlp"), function)(inputs, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("width", [34, 74, 130])
def test_twins(
    function: str, activation: str, count: int, width: int, dtype: torch.dtype
) -> None:
    """Any number of tokens of any width."""
    inputs = randn(count, width, dtype=dtype) * 2
    actual = run("optimized", function, inputs, activation)
    assert actual.dtype == dtype
    exact = run("reference", function, inputs.double(), activation)
    assert_budgeted("activate", actual, exact)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_roundings_are_the_twins(function: str) -> None:
    """What is coarser than the arithmetic is rounded in the same places."""
    inputs = randn(37, 34, dtype=torch.bfloat16)
    actual = run("optimized", function, inputs, "relu2")
    assert_same_order(actual, run("reference", function, inputs, "relu2"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tokens_of_nan_harm_no_other(function: str, activation: str) -> None:
    """Padding may hold anything."""
    inputs = randn(21, 34)
    expected = run("optimized", function, inputs, activation)
    is_real = torch.arange(21) % 5 != 3
    inputs[~is_real] = torch.nan
    actual = run("optimized", function, inputs, activation)
    assert_same_order(actual[is_real], expected[is_real])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_read_back(function: str, activation: str) -> None:
    """The host never waits for a number from the device."""
    inputs = randn(5, 34)
    with no_host_reads():
        run("optimized", function, inputs, activation)
