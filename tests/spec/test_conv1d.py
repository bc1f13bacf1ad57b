"""The causal convolution: right, cut anywhere, in any company, in any slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import (
    causal_conv1d_fn,
    causal_conv1d_update,
)

from tests import oracles
from tests.factories import (
    Row,
    dummies,
    load,
    make_batch,
    model_config,
    plan_sizes,
    randn,
)
from tests.tolerances import assert_budgeted, assert_consistent, assert_equal

SIZES = plan_sizes(model_config("mamba"))
ZERO = SIZES.zero_slot
SNAPSHOT = SIZES.first_snapshot_slot
LAST_LIVE = SIZES.max_requests - 1
CHANNELS, WIDTH = 13, 4
WINDOW = WIDTH - 1
LENGTHS = (1, 2, WINDOW, WIDTH, WIDTH + 1, 15, 16, 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def parameters(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Draw filters and biases."""
    weight = randn(CHANNELS, WIDTH, seed=8, dtype=dtype)
    return weight, randn(CHANNELS, seed=9, dtype=dtype)


def pool(dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a pool of NaN, but for the zero slot."""
    states = torch.full((SIZES.num_slots, CHANNELS, WINDOW), torch.nan, dtype=dtype)
    states[ZERO] = 0
    return states


def prefill(side: str, inputs: Tensor, states: Tensor, rows: list[Row]) -> Tensor:
    """Run a batch of prefill rows."""
    weight, bias = parameters(inputs.dtype)
    batch = make_batch(SIZES, [], rows)
    return load(side, "conv1d").conv_prefill(inputs, weight, bias, states, batch)


def decode(side: str, inputs: Tensor, states: Tensor, slots: list[int]) -> Tensor:
    """Run a batch of decode rows."""
    weight, bias = parameters(inputs.dtype)
    batch = make_batch(SIZES, [Row(9, [0], slot) for slot in slots])
    return load(side, "conv1d").conv_decode(inputs, weight, bias, states, batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_prefill_equals_the_formula(
    side: str, length: int, is_fresh: bool, dtype: torch.dtype
) -> None:
    """Outputs, and the last window, follow from the initial window and the inputs."""
    inputs, states = randn(length, CHANNELS, dtype=dtype), pool(dtype)
    states[SNAPSHOT] = randn(CHANNELS, WINDOW, seed=1)
    initial = ZERO if is_fresh else SNAPSHOT
    outputs = prefill(side, inputs, states, [Row(0, dummies(length), 2, initial)])
    exact = oracles.convolve(states[initial], inputs, *parameters(dtype))
    assert_budgeted("conv", outputs, exact)
    assert_equal(states[2], torch.cat((states[initial], inputs.T), 1)[:, -WINDOW:])


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_equals_transformers(side: str, length: int) -> None:
    """From no history, an independent implementation gives the same."""
    inputs, (weight, bias) = randn(length, CHANNELS), parameters()
    outputs = prefill(side, inputs, pool(), [Row(0, dummies(length), 2, ZERO)])
    theirs = causal_conv1d_fn(inputs.T[None], weight, bias, activation="silu")
    assert_budgeted("conv", outputs, theirs[0].T)


def test_decode_equals_transformers(side: str) -> None:
    """One token after a window, likewise, and the window slides on."""
    states, inputs, (weight, bias) = pool(), randn(2, CHANNELS), parameters()
    states[LAST_LIVE], states[0] = randn(2, CHANNELS, WINDOW, seed=1)
    theirs = states[[LAST_LIVE, 0]].clone()
    expected = causal_conv1d_update(inputs[..., None], theirs, weight, bias, "silu")
    outputs = decode(side, inputs, states, [LAST_LIVE, 0])
    assert_budgeted("conv", outputs, expected[..., 0])
    assert_equal(states[[LAST_LIVE, 0]], theirs)


def test_without_bias(side: str) -> None:
    """The bias may be missing."""
    inputs, states, (weight, _) = randn(5, CHANNELS), pool(), parameters()
    batch = make_batch(SIZES, [], [Row(0, dummies(5), 0, ZERO)])
    outputs = load(side, "conv1d").conv_prefill(inputs, weight, None, states, batch)
    exact = oracles.convolve(states[ZERO], inputs, weight, None)
    assert_budgeted("conv", outputs, exact)


@pytest.mark.parametrize("pool_dtype", DTYPES)
@given(pieces=st.lists(st.integers(0, WIDTH + 2), min_size=1, max_size=6))
def test_pieces_equal_the_whole(
    side: str, pool_dtype: torch.dtype, pieces: list[int]
) -> None:
    """A row cut anywhere, with windows of any dtype, gives the same numbers."""
    length = sum(pieces)
    inputs, states = randn(length, CHANNELS), pool(pool_dtype)
    whole = prefill(side, inputs, states, [Row(3, dummies(length), 0, ZERO)])
    outputs, start = [inputs[:0]], 0
    for count in pieces:
        row = Row(3 + start, dummies(count), 1, 1 if start else ZERO)
        part = inputs[start : start + count]
        outputs.append(prefill(side, part, states, [row]))
        start += count
    assert_consistent(side, "conv", torch.cat(outputs), whole)
    assert_equal(states[1], states[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_prefill(side: str, dtype: torch.dtype) -> None:
    """Token after token gives what one slice gives."""
    inputs, states = randn(9, CHANNELS, dtype=dtype), pool(dtype)
    whole = prefill(side, inputs, states, [Row(0, dummies(9), 0, ZERO)])
    states[1] = states[ZERO]
    steps = [decode(side, inputs[t : t + 1], states, [1]) for t in range(9)]
    assert_consistent(side, "conv", torch.cat(steps), whole)
    assert_equal(states[1], states[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(order=st.permutations(range(4)), slots=st.permutations(range(4)))
def test_company_changes_nothing(
    side: str, dtype: torch.dtype, order: list[int], slots: list[int]
) -> None:
    """A row gets the same numbers alone and in any place, order and slot."""
    lengths = [1, WINDOW, 6, 17]
    inputs = [randn(n, CHANNELS, seed=n, dtype=dtype) for n in lengths]
    windows = randn(4, CHANNELS, WINDOW, seed=5, dtype=dtype)
    crowd, alone = pool(dtype), pool(dtype)
    crowd[slots] = windows
    rows = [Row(9, dummies(lengths[i]), slots[i]) for i in order]
    outputs = prefill(side, torch.cat([inputs[i] for i in order]), crowd, rows)
    parts = outputs.split([lengths[i] for i in order])
    for i, part in zip(order, parts, strict=True):
        alone[0] = windows[i]
        single = prefill(side, inputs[i], alone, [Row(9, dummies(lengths[i]), 0)])
        assert_consistent(side, "conv", part, single)
        assert_equal(crowd[slots[i]], alone[0])


@given(start=st.integers(0, 20), length=st.integers(1, 24), data=st.data())
def test_snapshots_equal_a_run_that_ends_there(
    side: str, start: int, length: int, data: st.DataObject
) -> None:
    """A stored window is the one that a shorter slice would have left."""
    ends = data.draw(st.sets(st.integers(1, length), min_size=1, max_size=4))
    inputs, states = randn(length, CHANNELS), pool()
    states[3] = randn(CHANNELS, WINDOW, seed=1)
    targets = {end: SNAPSHOT + index for index, end in enumerate(sorted(ends))}
    stored = [(start + end, slot) for end, slot in targets.items()]
    other = Row(40, dummies(2), 1, ZERO)
    row = Row(start, dummies(length), 2, 3, snapshots=stored)
    both = torch.cat((randn(2, CHANNELS, seed=9), inputs))
    prefill(side, both, states, [other, row])
    for end, slot in targets.items():
        prefill(side, inputs[:end], states, [Row(start, dummies(end), 0, 3)])
        assert_equal(states[slot], states[0])


def test_other_slots_stay_untouched(side: str) -> None:
    """Only live and snapshot slots are written; a start elsewhere stays as it was."""
    states = pool()
    states[[1, SNAPSHOT]] = randn(2, CHANNELS, WINDOW)
    before = states.clone()
    row = Row(16, dummies(5), 2, SNAPSHOT, snapshots=[(20, SNAPSHOT + 3)])
    prefill(side, randn(5, CHANNELS), states, [row])
    decode(side, randn(1, CHANNELS), states, [1])
    changed = [2, SNAPSHOT + 3, 1]
    assert not states[changed].isnan().any()
    states[changed] = before[changed]
    assert_equal(states, before)


def test_rows_without_tokens(side: str) -> None:
    """An empty row hands its initial window on and disturbs nobody."""
    states, inputs = pool(), randn(4, CHANNELS)
    states[SNAPSHOT] = randn(CHANNELS, WINDOW, seed=1)
    rows = [Row(5, [], 0, SNAPSHOT), Row(0, dummies(4), 1, ZERO)]
    outputs = prefill(side, inputs, states, rows)
    alone = prefill(side, inputs, states, [replace(rows[1], slot=3)])
    assert_consistent(side, "conv", outputs, alone)
    assert_equal(states[0], states[SNAPSHOT])
    assert_equal(states[1], states[3])


def test_no_tokens(side: str) -> None:
    """A batch may lack either kind of row."""
    nothing = torch.zeros(0, CHANNELS)
    assert_equal(prefill(side, nothing, pool(), []), nothing)
    assert_equal(decode(side, nothing, pool(), []), nothing)
