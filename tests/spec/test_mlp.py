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
        for token in range(len(inputs)):
            row = inputs[token : token + 1].clone()
            alone = activate(row, activation)
            moved = activate(at_alignment(row, token), activation)
            part = together[token : token + 1]
            assert_consistent(side, "activate", part, alone)
            assert_consistent(side, "activate", moved, alone)


def test_no_tokens(side: str) -> None:
    """A batch may be empty."""
    nothing = torch.zeros(0, 5)
    assert_equal(load(side, "mlp").activate(nothing, "silu"), nothing)
