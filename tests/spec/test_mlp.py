"""Activations against their formulas, and alone against in company."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from tests import oracles
from tests.factories import at_alignment, load, randn
from tests.tolerances import (
    assert_budgeted,
    assert_consistent,
    assert_equal,
    assert_same_order,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ACTIVATIONS = ("relu2", "silu", "gelu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_formula(side: str, activation: str, dtype: torch.dtype) -> None:
    """Each activation is its formula."""
    inputs = randn(7, 33, dtype=dtype) * 3
    actual = load(side, "mlp").activate(inputs, activation)
    assert_budgeted("activate", actual, oracles.activate(inputs, activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_transformers(side: str, activation: str, dtype: torch.dtype) -> None:
    """Names mean what they mean in checkpoints."""
    inputs = randn(1, 33, dtype=dtype)
    actual = load(side, "mlp").activate(inputs, activation)
    assert_same_order(actual, ACT2FN[activation](inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_company_changes_nothing(
    side: str, activation: str, dtype: torch.dtype
) -> None:
    """A token gets the same numbers alone, in a batch, and at any alignment."""
    activate = load(side, "mlp").activate
    for width in (1, 3, 8, 13, 17, 35):
        inputs = randn(18, width, dtype=dtype)
        together = activate(inputs, activation)
        rows = [inputs[token : token + 1].clone() for token in range(len(inputs))]
        alone = [activate(row, activation) for row in rows]
        moved = [activate(at_alignment(r, t), activation) for t, r in enumerate(rows)]
        assert_consistent(side, "activate", together, torch.cat(alone))
        assert_consistent(side, "activate", together, torch.cat(moved))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_equals_the_formula(
    side: str, activation: str, dtype: torch.dtype
) -> None:
    """The first half gates the second."""
    inputs = randn(7, 34, dtype=dtype) * 3
    actual = load(side, "mlp").activate_gated(inputs, activation)
    exact = oracles.activate(inputs, activation, gated=True)
    assert_budgeted("activate", actual, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_equals_transformers(side: str, dtype: torch.dtype) -> None:
    """The activation is rounded before it meets what it gates."""
    gate, up = randn(1, 33, dtype=dtype), randn(1, 33, seed=1, dtype=dtype)
    actual = load(side, "mlp").activate_gated(torch.cat((gate, up), dim=1), "silu")
    assert_same_order(actual, ACT2FN["silu"](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_in_company(side: str, activation: str, dtype: torch.dtype) -> None:
    """A token gets the same numbers alone, in a batch, and at any alignment."""
    activate = load(side, "mlp").activate_gated
    for width in (2, 6, 16, 26, 34, 70):
        inputs = randn(18, width, dtype=dtype)
        together = activate(inputs, activation)
        rows = [at_alignment(inputs[t : t + 1], t) for t in range(len(inputs))]
        alone = [activate(row, activation) for row in rows]
        assert_consistent(side, "activate", together, torch.cat(alone))


def test_no_tokens(side: str) -> None:
    """A batch may be empty."""
    nothing = torch.zeros(0, 5)
    assert_equal(load(side, "mlp").activate(nothing, "silu"), nothing)
    nothing, half = torch.zeros(0, 6), torch.zeros(0, 3)
    assert_equal(load(side, "mlp").activate_gated(nothing, "silu"), half)
