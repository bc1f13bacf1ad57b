"""The convolution of all rows at once against token by token, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.batch import BatchMetadata
from tests.factories import load, randn
from tests.host_reads import no_host_reads
from tests.padded import place, split
from tests.plans import (
    Padding,
    Slice,
    boundaries,
    build,
    build_padded,
    make_sizes,
    make_step,
    paddings,
    steps,
)
from tests.tolerances import assert_budgeted, assert_equal

SIZES = make_sizes()
CHANNELS = 13
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def parameters(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Draw filters and biases."""
    weight = randn(CHANNELS, width, seed=8, dtype=dtype)
    return weight, randn(CHANNELS, seed=9, dtype=dtype)


def pool(width: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a pool in which only live and stored windows are numbers, and zero."""
    shape = CHANNELS, width - 1
    states = torch.full((SIZES.num_slots, *shape), torch.nan, dtype=dtype)
    states[: SIZES.zero_slot] = randn(SIZES.zero_slot, *shape, dtype=dtype)
    states[SIZES.zero_slot] = 0
    return states


def run(
    side: str,
    inputs: Tensor,
    layer: tuple[Tensor, Tensor | None],
    states: Tensor,
    batch: BatchMetadata,
) -> Tensor:
    """Convolve the real tokens of both kinds of row."""
    conv = load(side, "conv1d")
    decoding, prefilling = split(place(inputs, batch), batch)
    decoded = conv.conv_decode(decoding, *layer, states, batch)
    prefilled = conv.conv_prefill(prefilling, *layer, states, batch)
    return torch.cat((decoded, prefilled))[batch.token_mask]


def assert_twins(
    batch: BatchMetadata,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    has_bias: bool = True,
) -> None:
    """Hold windows equal, and outputs to their budget."""
    inputs = randn(batch.shape.tokens, CHANNELS, dtype=dtype)
    weight, bias = parameters(width, weight_dtype or dtype)
    layer = weight, bias if has_bias else None
    states, expected = pool(width, pool_dtype), pool(width, pool_dtype)
    outputs = run("optimized", inputs, layer, states, batch)
    run("reference", inputs, layer, expected, batch)
    assert_equal(states[: SIZES.dummy_slot], expected[: SIZES.dummy_slot])
    # As they enter, so that all else is exact.
    rounded = inputs.to(pool_dtype).double()
    wide = weight.double(), bias.double() if has_bias else None
    exact = run("reference", rounded, wide, pool(width, pool_dtype).double(), batch)
    assert outputs.dtype == dtype
    assert_budgeted("conv", outputs, exact)


def edge_slices(width: int, start: int) -> list[Slice]:
    """Make slices of all lengths at which something changes, windows stored in them."""
    chunk = SIZES.scan_chunk_size
    around = {1, 2, width - 1, width, width + 1, chunk - 1, chunk, chunk + 1, 37}
    pieces = [Slice(start, start + length) for length in sorted(around - {0})]
    for piece in pieces:
        piece.snapshots = boundaries(piece, SIZES)
        piece.is_resumed = piece.end % 2 > 0 and start > 0
    return pieces


@pytest.mark.parametrize("width", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("start", [0, 15, 16, 37])
@pytest.mark.parametrize("has_bias", [False, True])
def test_edge_slices(width: int, start: int, has_bias: bool) -> None:
    """Ragged rows from any start, shorter and longer than the filter."""
    step = make_step(SIZES, [], edge_slices(width, start))
    batch = build("optimized", SIZES, step, all_logits=False)
    assert_twins(batch, width, has_bias=has_bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Inputs and pool of any width."""
    step = make_step(SIZES, [Slice(7, 8), Slice(1, 2)], edge_slices(4, 5))
    batch = build("optimized", SIZES, step, all_logits=False)
    assert_twins(batch, 4, dtype, pool_dtype)


def test_products_are_not_rounded() -> None:
    """Coarse filters meet their inputs in the dtype of the arithmetic."""
    step = make_step(SIZES, [Slice(7, 8), Slice(1, 2)], edge_slices(4, 5))
    batch = build("optimized", SIZES, step, all_logits=False)
    assert_twins(batch, weight_dtype=torch.bfloat16)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("is_decode", [False, True])
def test_rows_of_one_kind(count: int, is_decode: bool) -> None:
    """One or many rows of a kind, and none of the other."""
    pieces = [Slice(9 + index, 10 + index) for index in range(count)]
    step = make_step(SIZES, pieces, []) if is_decode else make_step(SIZES, [], pieces)
    assert_twins(build("optimized", SIZES, step, all_logits=False))


@given(data=st.data(), padding=paddings())
def test_any_padded_step(data: st.DataObject, padding: Padding) -> None:
    """Rows of both kinds from a plan, among NaN; only the dummy slot takes any."""
    step = data.draw(steps(SIZES))
    real = build("reference", SIZES, step, all_logits=False)
    padded = build_padded(SIZES, step, padding)
    inputs, layer = randn(real.shape.tokens, CHANNELS), parameters(4)
    states, expected = pool(), pool()
    outputs = run("optimized", inputs, layer, states, padded)
    exact = run("reference", inputs, layer, expected, real)
    assert_equal(states[: SIZES.dummy_slot], expected[: SIZES.dummy_slot])
    assert_budgeted("conv", outputs, exact)


def test_initial_windows_are_read_before_any_is_written() -> None:
    """A row may start from the slot that another writes."""
    step = make_step(SIZES, [], [Slice(3, 20), Slice(5, 40, is_resumed=True)])
    first, second = step[0].rows
    states, layer, inputs = pool(), parameters(4), randn(52, CHANNELS)
    batch = build("optimized", SIZES, step, all_logits=False)
    crossed = torch.tensor([second.slot_id, first.slot_id])
    starts = states[crossed].clone()
    run("optimized", inputs, layer, states, replace(batch, initial_slot_ids=crossed))
    apart = pool()
    apart[batch.initial_slot_ids] = starts
    run("reference", inputs, layer, apart, batch)
    for row in (first, second):
        assert_equal(states[row.slot_id], apart[row.slot_id])


def test_a_row_of_nan_harms_no_other() -> None:
    """What goes wrong in a row stays in it."""
    step = make_step(SIZES, [], [Slice(3, 20), Slice(5, 40), Slice(9, 12)])
    batch = build("optimized", SIZES, step, all_logits=False)
    layer, inputs = parameters(4), randn(55, CHANNELS)
    good, bad = pool(), pool()
    bad[step[0].rows[1].slot_id] = torch.nan
    expected = run("optimized", inputs, layer, good, batch)
    inputs[17:52] = torch.nan
    outputs = run("optimized", inputs, layer, bad, batch)
    assert outputs[17:52].isnan().all()
    for rows in (slice(0, 17), slice(52, 55)):
        assert_budgeted("conv", outputs[rows], expected[rows])
    for row in (step[0].rows[0], step[0].rows[2]):
        assert_equal(bad[row.slot_id], good[row.slot_id])


def test_nothing_is_read_back() -> None:
    """The host never waits for a number from the device."""
    step = make_step(SIZES, [Slice(7, 8)], [Slice(3, 40, snapshots=[16, 32])])
    batch = build_padded(SIZES, step, Padding(1, 2, 3, 4))
    states, layer = pool(), parameters(4)
    decoding, prefilling = split(place(randn(38, CHANNELS), batch), batch)
    conv = load("optimized", "conv1d")
    with no_host_reads():
        conv.conv_decode(decoding, *layer, states, batch)
        conv.conv_prefill(prefilling, *layer, states, batch)
