"""The selective scan: right, cut anywhere, in any company, in any slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from lockstep.batch import ScanTokens
from lockstep.config import MambaConfig
from lockstep.parameters import MambaParameters
from tests import oracles
from tests.factories import (
    MAMBA,
    Row,
    dummies,
    join,
    load,
    make_batch,
    model_config,
    plan_sizes,
    randn,
    random_parameters,
    scan_tokens,
    take,
)
from tests.tolerances import assert_budgeted, assert_consistent, assert_equal

SIZES = plan_sizes(model_config("mamba"))
ZERO = SIZES.zero_slot
SNAPSHOT = SIZES.first_snapshot_slot
LAST_LIVE = SIZES.max_requests - 1
STATE = (MAMBA.num_heads, MAMBA.head_dim, MAMBA.state_size)
CHUNK = SIZES.scan_chunk_size
LENGTHS = (1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
POOL_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float64: torch.float64,
}


def parameters(dtype: torch.dtype = torch.float32) -> MambaParameters:
    """Draw one layer's parameters."""
    layer = random_parameters(model_config("mamba"), dtype=dtype).layers[0]
    assert isinstance(layer, MambaParameters)
    return layer


def pool(dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a pool of NaN, but for the zero slot."""
    states = torch.full((SIZES.num_slots, *STATE), torch.nan, dtype=dtype)
    states[ZERO] = 0
    return states


def prefill(
    side: str,
    tokens: ScanTokens,
    states: Tensor,
    rows: list[Row],
    config: MambaConfig = MAMBA,
) -> Tensor:
    """Run a batch of prefill rows."""
    batch, layer = make_batch(SIZES, [], rows), parameters(tokens.x.dtype)
    return load(side, "scan").scan_prefill(tokens, layer, config, states, batch)


def decode(side: str, tokens: ScanTokens, states: Tensor, slots: list[int]) -> Tensor:
    """Run a batch of decode rows."""
    batch = make_batch(SIZES, [Row(9, [0], slot) for slot in slots])
    layer = parameters(tokens.x.dtype)
    return load(side, "scan").scan_decode(tokens, layer, MAMBA, states, batch)


def exact_scan(
    tokens: ScanTokens, initial: Tensor, config: MambaConfig = MAMBA
) -> tuple[Tensor, Tensor]:
    """Return y and the last state from the matrix form."""
    p = parameters(tokens.x.dtype)
    limit = config.time_step_limit
    return oracles.selective_scan(*tokens, p.A, p.dt_bias, p.D, limit, initial)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_prefill_equals_the_matrix_form(
    side: str, length: int, is_fresh: bool, dtype: torch.dtype
) -> None:
    """The recurrence gives what the quadratic form of the same map gives."""
    tokens, states = scan_tokens(MAMBA, length, dtype=dtype), pool(POOL_DTYPES[dtype])
    states[SNAPSHOT] = randn(*STATE, seed=7)
    initial = ZERO if is_fresh else SNAPSHOT
    y = prefill(side, tokens, states, [Row(5, dummies(length), 2, initial)])
    exact_y, exact_state = exact_scan(tokens, states[initial])
    assert_budgeted("scan", y, exact_y)
    assert_budgeted("scan_state", states[2], exact_state)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_equals_transformers(side: str, length: int) -> None:
    """An independent chunked implementation gives the same, limits included."""
    config = replace(MAMBA, time_step_limit=(0.3, 1.1))
    tokens, states, layer = scan_tokens(MAMBA, length), pool(), parameters()
    states[1] = randn(*STATE, seed=7)
    theirs, last = mamba2_chunk_scan(
        tokens.x[None],
        tokens.dt[None],
        layer.A,
        tokens.B[None],
        tokens.C[None],
        chunk_size=CHUNK,
        D=layer.D,
        dt_bias=layer.dt_bias,
        initial_states=states[1][None].clone(),
        dt_softplus=True,
        dt_limit=config.time_step_limit,
        return_final_states=True,
    )
    y = prefill(side, tokens, states, [Row(0, dummies(length), 1)], config)
    assert_budgeted("scan_chunked", y, theirs[0])
    assert_budgeted("scan_chunked", states[1], last[0])


def test_decode_equals_transformers(side: str) -> None:
    """One step of two rows, likewise."""
    tokens, states, layer = scan_tokens(MAMBA, 2), pool(), parameters()
    slots = [LAST_LIVE, 0]
    states[slots] = randn(2, *STATE, seed=7)
    theirs = states[slots].clone()
    expected = mamba2_selective_state_update(
        theirs,
        tokens.x,
        tokens.dt[..., None].expand_as(tokens.x),
        layer.A[:, None, None].expand(STATE),
        tokens.B,
        tokens.C,
        D=layer.D[:, None].expand(STATE[:2]),
        dt_bias=layer.dt_bias[:, None].expand(STATE[:2]),
        dt_softplus=True,
    )
    assert_budgeted("scan", decode(side, tokens, states, slots), expected)
    assert_budgeted("scan_state", states[slots], theirs)


@pytest.mark.parametrize("limit", [(0.0, 0.2), (0.5, 0.6), (2.0, float("inf"))])
def test_time_steps_are_clamped(side: str, limit: tuple[float, float]) -> None:
    """Time steps stay in their range, after the softplus."""
    config = replace(MAMBA, time_step_limit=limit)
    tokens, states = scan_tokens(MAMBA, 9), pool()
    y = prefill(side, tokens, states, [Row(0, dummies(9), 2, ZERO)], config)
    assert_budgeted("scan", y, exact_scan(tokens, states[ZERO], config)[0])


def test_heads_read_their_group(side: str) -> None:
    """Heads of one group do not see the B and C of another."""
    tokens = scan_tokens(MAMBA, 6)
    other = tokens._replace(B=tokens.B.clone(), C=tokens.C.clone())
    other.B[:, 1], other.C[:, 1] = 5.0, -5.0
    row = [Row(0, dummies(6), 2, ZERO)]
    first, second = (prefill(side, t, pool(), row) for t in (tokens, other))
    boundary = MAMBA.num_heads // MAMBA.num_groups
    assert_equal(first[:, :boundary], second[:, :boundary])
    assert (first[:, boundary:] != second[:, boundary:]).all()


@pytest.mark.parametrize("pool_dtype", DTYPES)
@given(pieces=st.lists(st.integers(0, CHUNK + 1), min_size=1, max_size=5))
def test_pieces_equal_the_whole(
    side: str, pool_dtype: torch.dtype, pieces: list[int]
) -> None:
    """A row cut anywhere, with states of any dtype, gives the same numbers."""
    length = sum(pieces)
    tokens, states = scan_tokens(MAMBA, length), pool(pool_dtype)
    whole = prefill(side, tokens, states, [Row(3, dummies(length), 0, ZERO)])
    outputs, start = [whole[:0]], 0
    for count in pieces:
        row = Row(3 + start, dummies(count), 1, 1 if start else ZERO)
        part = take(tokens, start, start + count)
        outputs.append(prefill(side, part, states, [row]))
        start += count
    assert_consistent(side, "scan", torch.cat(outputs), whole, pool_dtype)
    assert_consistent(side, "scan_state", states[1], states[0], tokens.x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_prefill(side: str, dtype: torch.dtype) -> None:
    """Token after token gives what one slice gives."""
    tokens, states = scan_tokens(MAMBA, 9, dtype=dtype), pool(POOL_DTYPES[dtype])
    whole = prefill(side, tokens, states, [Row(0, dummies(9), 0, ZERO)])
    states[1] = states[ZERO]
    steps = [decode(side, take(tokens, t, t + 1), states, [1]) for t in range(9)]
    assert_consistent(side, "scan", torch.cat(steps), whole)
    assert_consistent(side, "scan_state", states[1], states[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(order=st.permutations(range(4)), slots=st.permutations(range(4)))
def test_company_changes_nothing(
    side: str, dtype: torch.dtype, order: list[int], slots: list[int]
) -> None:
    """A row gets the same numbers alone and in any place, order and slot."""
    lengths = [1, 3, CHUNK, CHUNK + 1]
    tokens = [scan_tokens(MAMBA, n, seed=n, dtype=dtype) for n in lengths]
    initial = randn(4, *STATE, seed=7, dtype=POOL_DTYPES[dtype])
    crowd, alone = pool(POOL_DTYPES[dtype]), pool(POOL_DTYPES[dtype])
    crowd[slots] = initial
    rows = [Row(9, dummies(lengths[i]), slots[i]) for i in order]
    y = prefill(side, join([tokens[i] for i in order]), crowd, rows)
    parts = y.split([lengths[i] for i in order])
    for i, part in zip(order, parts, strict=True):
        alone[0] = initial[i]
        single = prefill(side, tokens[i], alone, [Row(9, dummies(lengths[i]), 0)])
        assert_consistent(side, "scan", part, single)
        assert_consistent(side, "scan_state", crowd[slots[i]], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(slots=st.permutations(range(4)))
def test_decode_company_changes_nothing(
    side: str, dtype: torch.dtype, slots: list[int]
) -> None:
    """A decode row gets the same numbers alone and among others."""
    tokens = scan_tokens(MAMBA, 4, dtype=dtype)
    states = pool(POOL_DTYPES[dtype])
    states[slots] = randn(4, *STATE, seed=7, dtype=states.dtype)
    alone = states.clone()
    together = decode(side, tokens, states, slots)
    for index, slot in enumerate(slots):
        single = decode(side, take(tokens, index, index + 1), alone, [slot])
        assert_consistent(side, "scan", together[index : index + 1], single)
    assert_consistent(side, "scan_state", states[slots], alone[slots])


@given(blocks=st.integers(0, 1), length=st.integers(1, 3 * CHUNK), data=st.data())
def test_snapshots_equal_a_run_that_ends_there(
    side: str, blocks: int, length: int, data: st.DataObject
) -> None:
    """A state stored at a boundary is the one that a shorter slice would have left."""
    offset = data.draw(st.integers(0, CHUNK - 1))
    start = blocks * CHUNK + offset
    first = (start // CHUNK + 1) * CHUNK
    boundaries = range(first, start + length + 1, CHUNK)
    targets = {end: SNAPSHOT + index for index, end in enumerate(boundaries)}
    tokens, states = scan_tokens(MAMBA, length), pool()
    states[3] = randn(*STATE, seed=7)
    row = Row(start, dummies(length), 2, 3, snapshots=list(targets.items()))
    other = Row(40, dummies(2), 1, ZERO)
    both = join([scan_tokens(MAMBA, 2, seed=9), tokens])
    prefill(side, both, states, [other, row])
    for end, slot in targets.items():
        count = end - start
        part = take(tokens, 0, count)
        prefill(side, part, states, [Row(start, dummies(count), 0, 3)])
        assert_consistent(side, "scan_state", states[slot], states[0])


def test_other_slots_stay_untouched(side: str) -> None:
    """Only live and snapshot slots are written; a start elsewhere stays as it was."""
    states = pool()
    states[[1, SNAPSHOT]] = randn(2, *STATE)
    before = states.clone()
    row = Row(12, dummies(9), 2, SNAPSHOT, snapshots=[(CHUNK, SNAPSHOT + 3)])
    prefill(side, scan_tokens(MAMBA, 9), states, [row])
    decode(side, scan_tokens(MAMBA, 1), states, [1])
    changed = [2, SNAPSHOT + 3, 1]
    assert not states[changed].isnan().any()
    states[changed] = before[changed]
    assert_equal(states, before)


def test_rows_without_tokens(side: str) -> None:
    """An empty row hands its initial state on and disturbs nobody."""
    states, tokens = pool(), scan_tokens(MAMBA, 4)
    states[SNAPSHOT] = randn(*STATE, seed=7)
    rows = [Row(5, [], 0, SNAPSHOT), Row(0, dummies(4), 1, ZERO)]
    y = prefill(side, tokens, states, rows)
    alone = prefill(side, tokens, states, [replace(rows[1], slot=3)])
    assert_consistent(side, "scan", y, alone)
    assert_equal(states[0], states[SNAPSHOT])
    assert_consistent(side, "scan_state", states[1], states[3])


def test_no_tokens(side: str) -> None:
    """A batch may lack either kind of row."""
    nothing = scan_tokens(MAMBA, 0)
    assert_equal(prefill(side, nothing, pool(), []), nothing.x)
    assert_equal(decode(side, nothing, pool(), []), nothing.x)
