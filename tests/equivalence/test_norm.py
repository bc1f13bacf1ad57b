"""Norms of all tokens against those of each, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import generator, load, randn
from tests.host_reads import no_host_reads
from tests.tolerances import assert_budgeted, assert_equal, assert_same_order

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COUNTS = (0, 1, 2, 3, 15, 16, 17, 37)
GROUPS = (1, 2, 3)
EPS = 1e-5


def draw(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw two rows a token, and a weight."""
    rows = [randn(count, width, seed=seed, dtype=dtype) for seed in (1, 2)]
    return rows[0], rows[1], randn(width, seed=3, dtype=dtype)


def run(side: str, name: str, *given: Any) -> Any:
    """Call a side's function."""
    return getattr(load(side, "norm"), name)(*given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("width", [6, 19, 66, 130])
def test_twins(count: int, width: int, dtype: torch.dtype) -> None:
    """Any number of tokens of any width."""
    hidden, _, weight = draw(count, width, dtype)
    actual = run("optimized", "rms_norm", hidden, weight, EPS)
    exact = run("reference", "rms_norm", hidden.double(), weight.double(), EPS)
    assert actual.dtype == dtype
    assert_budgeted("rms_norm", actual, exact)


@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_adding_twins(count: int, dtype: torch.dtype, stream: torch.dtype) -> None:
    """The stream is the same bit for bit, also one that is wider than the model."""
    residual, update, weight = draw(count, 19, dtype)
    residual = residual.to(stream)
    totals = [
        run(side, "add_rms_norm", residual, update, weight, EPS)
        for side in ("reference", "optimized")
    ]
    assert_equal(totals[1][0], totals[0][0])
    total, normed = totals[1]
    exact = run("reference", "rms_norm", total.double(), weight.double(), EPS)
    assert normed.dtype == dtype
    assert_budgeted("rms_norm", normed.to(coarser(dtype, stream)), exact)


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the dtype that rounds more."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("width", [6, 30, 66])
def test_gated_twins(
    count: int, width: int, num_groups: int, dtype: torch.dtype
) -> None:
    """Any number of tokens and groups."""
    hidden, gate, weight = draw(count, width, dtype)
    given = hidden, gate, weight
    wide = [part.double() for part in given]
    actual = run("optimized", "gated_group_rms_norm", *given, EPS, num_groups)
    exact = run("reference", "gated_group_rms_norm", *wide, EPS, num_groups)
    assert actual.dtype == dtype
    assert_budgeted("gated_group_rms_norm", actual, exact)


@pytest.mark.parametrize("num_groups", GROUPS)
def test_roundings_are_the_twins(num_groups: int) -> None:
    """Where any order of additions gives the same sum, so do both sides.

    Values are whole numbers; gates are so large that they equal their SiLU.
    """
    size = (37, 30)
    draw_whole = generator(5)
    hidden = torch.randint(-3, 4, size, generator=draw_whole, device="cpu")
    gate = torch.randint(1, 4, size, generator=draw_whole, device="cpu") * 32
    device = randn(0).device
    rows = [part.to(device, torch.bfloat16) for part in (hidden, gate)]
    weight = randn(30, seed=3, dtype=torch.bfloat16)
    for name, given in (
        ("rms_norm", (rows[0], weight, EPS)),
        ("gated_group_rms_norm", (*rows, weight, EPS, num_groups)),
    ):
        actual = run("optimized", name, *given)
        assert_same_order(actual, run("reference", name, *given))


def test_gates_are_not_rounded() -> None:
    """The SiLU of a coarse gate meets what it gates in the dtype of the arithmetic."""
    hidden, gate, weight = draw(17, 30, torch.float32)
    given = hidden, gate.bfloat16(), weight
    wide = [part.double() for part in given]
    actual = run("optimized", "gated_group_rms_norm", *given, EPS, 2)
    exact = run("reference", "gated_group_rms_norm", *wide, EPS, 2)
    assert_budgeted("gated_group_rms_norm", actual, exact)


def test_tokens_of_nan_harm_no_other() -> None:
    """Padding may hold anything."""
    hidden, gate, weight = draw(21, 30, torch.float32)
    is_real = torch.arange(21) % 5 != 3
    poisoned = hidden.masked_fill(~is_real[:, None], torch.nan)
    for name, given in (
        ("rms_norm", (weight, EPS)),
        ("gated_group_rms_norm", (gate, weight, EPS, 3)),
    ):
        expected = run("optimized", name, hidden, *given)
        actual = run("optimized", name, poisoned, *given)
        assert_same_order(actual[is_real], expected[is_real])


def test_nothing_is_read_back() -> None:
    """The host never waits for a number from the device."""
    hidden, gate, weight = draw(5, 30, torch.float32)
    with no_host_reads():
        run("optimized", "add_rms_norm", hidden, gate, weight, EPS)
        run("optimized", "gated_group_rms_norm", hidden, gate, weight, EPS, 3)
