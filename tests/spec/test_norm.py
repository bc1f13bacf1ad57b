"""Norms against formulas, against published code, and alone against in company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests import oracles
from tests.factories import at_alignment, load, randn
from tests.tolerances import (
    assert_budgeted,
    assert_consistent,
    assert_equal,
    assert_same_order,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
EPS = 1e-5


def gated_norm(side: str, width: int, num_groups: int) -> Callable[[Tensor], Tensor]:
    """Return the gated norm as a function of one array: values, then gates."""
    norm = load(side, "norm").gated_group_rms_norm

    def function(both: Tensor) -> Tensor:
        weight = randn(width, seed=3, dtype=both.dtype)
        return norm(both[:, :width], both[:, width:], weight, EPS, num_groups)

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 19, 64])
def test_rms_norm(side: str, width: int, dtype: torch.dtype) -> None:
    """The norm is its formula."""
    hidden, weight = randn(5, width, dtype=dtype), randn(width, seed=1, dtype=dtype)
    actual = load(side, "norm").rms_norm(hidden, weight, EPS)
    assert_budgeted("rms_norm", actual, oracles.rms_norm(hidden, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(side: str, dtype: torch.dtype) -> None:
    """Dtypes change hands where the published model changes them."""
    hidden, weight = randn(1, 19, dtype=dtype), randn(19, seed=1, dtype=dtype)
    theirs = NemotronHRMSNorm(19, EPS)
    theirs.weight.data = weight
    actual = load(side, "norm").rms_norm(hidden, weight, EPS)
    assert_same_order(actual, theirs(hidden).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(side: str, dtype: torch.dtype) -> None:
    """The sum is rounded to the stream's dtype before it is normed."""
    norm = load(side, "norm")
    residual, update = randn(6, 19, dtype=dtype), randn(6, 19, seed=1, dtype=dtype)
    weight = randn(19, seed=2, dtype=dtype)
    total, normed = norm.add_rms_norm(residual, update, weight, EPS)
    assert_equal(total, residual + update)
    assert_equal(normed, norm.rms_norm(residual + update, weight, EPS))


def test_a_wide_stream(side: str) -> None:
    """A float32 stream stays so, and its norm has the dtype of the weight."""
    norm = load(side, "norm")
    residual, update = randn(6, 19), randn(6, 19, seed=1, dtype=torch.bfloat16)
    weight = randn(19, seed=2, dtype=torch.bfloat16)
    total, normed = norm.add_rms_norm(residual, update, weight, EPS)
    assert_equal(total, residual + update.float())
    assert normed.dtype == torch.bfloat16
    assert_budgeted("rms_norm", normed, oracles.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_gated_norm(side: str, num_groups: int, dtype: torch.dtype) -> None:
    """The gate comes first, and each group has its own scale."""
    both = randn(5, 40, dtype=dtype)
    exact = oracles.gated_group_rms_norm(
        both[:, :20], both[:, 20:], randn(20, seed=3, dtype=dtype), EPS, num_groups
    )
    actual = gated_norm(side, 20, num_groups)(both)
    assert_budgeted("gated_group_rms_norm", actual, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_equals_transformers(side: str, dtype: torch.dtype) -> None:
    """Dtypes change hands where the published model changes them."""
    both = randn(1, 40, dtype=dtype)
    theirs = Zamba2RMSNormGated(20, group_size=10, eps=EPS)
    theirs.weight.data = randn(20, seed=3, dtype=dtype)
    expected = theirs(both[:, :20], both[:, 20:]).detach()
    assert_same_order(gated_norm(side, 20, 2)(both), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 10, 18, 34, 66])
def test_company_changes_nothing(side: str, width: int, dtype: torch.dtype) -> None:
    """A token gets the same numbers alone, in a batch, and at any alignment."""
    norm = load(side, "norm")
    weight = randn(width, seed=1, dtype=dtype)
    functions = {
        "rms_norm": lambda rows: norm.rms_norm(rows, weight, EPS),
        "gated_group_rms_norm": gated_norm(side, width // 2, 1),
    }
    rows = randn(18, width, dtype=dtype)
    for name, function in functions.items():
        together = function(rows)
        for token in range(len(rows)):
            row = rows[token : token + 1].clone()
            alone = function(row)
            assert_consistent(side, name, together[token : token + 1], alone)
            assert_consistent(side, name, function(at_alignment(row, token)), alone)


def test_zeros_stay_zeros(side: str) -> None:
    """Nothing is divided by zero."""
    zeros = torch.zeros(2, 8)
    actual = load(side, "norm").rms_norm(zeros, torch.ones(8), EPS)
    assert_equal(actual, zeros)


def test_no_tokens(side: str) -> None:
    """A batch may be empty."""
    nothing, weight = torch.zeros(0, 8), torch.ones(8)
    norm = load(side, "norm")
    assert_equal(norm.rms_norm(nothing, weight, EPS), nothing)
    actual = norm.gated_group_rms_norm(nothing, nothing, weight, EPS, 2)
    assert_equal(actual, nothing)
