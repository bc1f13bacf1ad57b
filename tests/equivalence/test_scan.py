"""The selective scan in chunks against token by token, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig, Sizes
from lockstep.parameters import MambaParameters
from tests.factories import (
    MAMBA,
    load,
    model_config,
    randn,
    random_parameters,
    scan_tokens,
    take,
)
from tests.plans import (
    Padding,
    Slice,
    Step,
    boundaries,
    build,
    build_padded,
    edge_lengths,
    make_sizes,
    make_step,
    paddings,
    steps,
)
from tests.tolerances import (
    UNIT_ROUNDOFF,
    assert_budgeted,
    assert_equal,
    assert_same_order,
)

CHUNKS = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
STATE = (MAMBA.num_heads, MAMBA.head_dim, MAMBA.state_size)


def parameters(is_slow: bool = False) -> MambaParameters:
    """Draw one layer's parameters; slow ones remember a thousand tokens."""
    layer = random_parameters(model_config("mamba")).layers[0]
    assert isinstance(layer, MambaParameters)
    if is_slow:
        return replace(layer, A=layer.A / 50, dt_bias=layer.dt_bias - 2)
    return layer


def pool(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a pool in which only live and stored states are numbers, and zero."""
    states = torch.full((sizes.num_slots, *STATE), torch.nan, dtype=dtype)
    states[: sizes.zero_slot] = randn(sizes.zero_slot, *STATE, dtype=dtype)
    states[sizes.zero_slot] = 0
    return states


def exact(
    name: str,
    tokens: ScanTokens,
    layer: MambaParameters,
    config: MambaConfig,
    states: Tensor,
    batch: BatchMetadata,
) -> Tensor:
    """Run the reference in float64; states are written."""
    wide = ScanTokens(*(part.double() for part in tokens))
    layer = replace(
        layer, A=layer.A.double(), dt_bias=layer.dt_bias.double(), D=layer.D.double()
    )
    return getattr(load("reference", "scan"), name)(wide, layer, config, states, batch)


def compare(
    name: str,
    tokens: ScanTokens,
    batch: BatchMetadata,
    states: Tensor,
    layer: MambaParameters | None = None,
    **options: Any,
) -> None:
    """Hold outputs and all states of the optimized side to their budgets."""
    layer = layer or parameters()
    config = replace(MAMBA, **options)
    mine, truth = states.clone(), states.double()
    function = getattr(load("optimized", "scan"), name)
    y = function(tokens, layer, config, mine, batch)
    exact_y = exact(name, tokens, layer, config, truth, batch)
    assert y.dtype == tokens.x.dtype
    slots = written_slots(batch)
    # States are as exact as the narrower of pool and arithmetic, and so are outputs.
    width = narrower(torch.promote_types(y.dtype, torch.float32), states.dtype)
    assert_budgeted("chunk_scan_state", mine[slots].to(width), truth[slots])
    assert_budgeted("chunk_scan", y.to(narrower(y.dtype, width)), exact_y)
    mine[slots] = states[slots]
    assert_equal(mine, states)


def narrower(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that rounds most."""
    return max(dtypes, key=lambda dtype: UNIT_ROUNDOFF[dtype])


def written_slots(batch: BatchMetadata) -> list[int]:
    """List the slots that a batch may write; a decode row's copy is made later."""
    named = (batch.decode_slot_ids, batch.prefill_slot_ids, batch.snapshot_slot_ids)
    return torch.cat(named).tolist()


def prefill_step(sizes: Sizes, start: int) -> Step:
    """Make a step of slices of all edge lengths, states stored wherever possible."""
    pieces = [Slice(start, start + length) for length in edge_lengths(sizes)]
    for piece in pieces:
        piece.snapshots = boundaries(piece, sizes)
        piece.is_resumed = piece.end % 2 > 0 and start > 0
    return make_step(sizes, [], pieces)


def num_prefilled(batch: BatchMetadata) -> int:
    """Count tokens of prefill rows, padding included."""
    return batch.padded_shape.tokens - batch.num_decode_tokens


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("chunks", "offset"), [(0, 0), (1, -1), (1, 0), (2, 5)])
@pytest.mark.parametrize("is_slow", [False, True])
def test_edge_slices(chunk: int, chunks: int, offset: int, is_slow: bool) -> None:
    """Ragged rows from any start; fast decays and slow ones."""
    sizes = make_sizes(chunk)
    step = prefill_step(sizes, chunks * chunk + offset)
    batch = build("reference", sizes, step, all_logits=False)
    tokens = scan_tokens(MAMBA, num_prefilled(batch))
    layer = parameters(is_slow)
    compare("scan_prefill", tokens, batch, pool(sizes), layer, scan_chunk_size=chunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Tokens and pool of any width."""
    sizes = make_sizes()
    batch = build("reference", sizes, prefill_step(sizes, 5), all_logits=False)
    tokens = scan_tokens(MAMBA, num_prefilled(batch), dtype=dtype)
    compare("scan_prefill", tokens, batch, pool(sizes, pool_dtype), scan_chunk_size=16)


@pytest.mark.parametrize("limit", [(0.0, 0.2), (0.5, 0.6), (2.0, float("inf"))])
def test_time_steps_are_clamped(limit: tuple[float, float]) -> None:
    """Empty lanes stay empty where the range of time steps excludes zero."""
    sizes = make_sizes()
    batch = build("reference", sizes, prefill_step(sizes, 5), all_logits=False)
    tokens = scan_tokens(MAMBA, num_prefilled(batch))
    compare(
        "scan_prefill",
        tokens,
        batch,
        pool(sizes),
        scan_chunk_size=16,
        time_step_limit=limit,
    )


@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    """Rows of both kinds from a plan, with states stored and restored."""
    sizes = make_sizes()
    batch = build("reference", sizes, data.draw(steps(sizes)), all_logits=False)
    for name, count in (
        ("scan_decode", batch.num_decode_tokens),
        ("scan_prefill", num_prefilled(batch)),
    ):
        only = replace(batch, **nothing_of_other_kind(name, batch))
        compare(name, scan_tokens(MAMBA, count), only, pool(sizes), scan_chunk_size=16)


def nothing_of_other_kind(name: str, batch: BatchMetadata) -> dict[str, Tensor]:
    """Empty the lists of slots that a function has nothing to do with."""
    kinds = {
        "scan_decode": ("prefill_slot_ids", "snapshot_slot_ids"),
        "scan_prefill": ("decode_slot_ids",),
    }
    return {field: getattr(batch, field)[:0] for field in kinds[name]}


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows(count: int, dtype: torch.dtype) -> None:
    """None, one, many."""
    sizes = make_sizes()
    pieces = [Slice(9 + index, 10 + index) for index in range(count)]
    step = make_step(sizes, pieces, [] if pieces else [Slice(0, 1)])
    batch = build("reference", sizes, step, all_logits=False)
    batch = replace(batch, **nothing_of_other_kind("scan_decode", batch))
    wide = torch.promote_types(dtype, torch.float32)
    tokens = scan_tokens(MAMBA, count, dtype=dtype)
    compare("scan_decode", tokens, batch, pool(sizes, wide))


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 32])
def test_resuming_at_a_chunk_is_going_on(pool_dtype: torch.dtype, start: int) -> None:
    """States are handed on as they are stored, so a cut there changes no bit."""
    sizes = make_sizes()
    tokens, layer = scan_tokens(MAMBA, 59), parameters()
    whole, cut = pool(sizes, pool_dtype), pool(sizes, pool_dtype)

    def run(states: Tensor, first: int, end: int) -> Tensor:
        step = make_step(sizes, [], [Slice(first, end)])
        batch = build("optimized", sizes, step, all_logits=False)
        part = take(tokens, first - start, end - start)
        scan = load("optimized", "scan").scan_prefill
        return scan(part, layer, MAMBA, states, batch)

    expected = run(whole, start, start + 59)
    ends = [start + end for end in (16, 32, 48, 59)]
    pieces = [run(cut, a, b) for a, b in zip([start, *ends], ends, strict=False)]
    assert_same_order(torch.cat(pieces), expected)
    assert_same_order(cut, whole)


@given(data=st.data(), padding=paddings())
def test_padding_changes_nothing(data: st.DataObject, padding: Padding) -> None:
    """Padded arrays give real rows the same, and write nothing but the dummy slot."""
    sizes, layer = make_sizes(), parameters()
    step = data.draw(steps(sizes))
    real = build("optimized", sizes, step, all_logits=False)
    padded = build_padded(sizes, step, padding)
    scan = load("optimized", "scan")
    for function, count, size in (
        (scan.scan_decode, real.num_decode_tokens, padded.num_decode_tokens),
        (scan.scan_prefill, num_prefilled(real), num_prefilled(padded)),
    ):
        tokens, filler = scan_tokens(MAMBA, count), scan_tokens(MAMBA, size, seed=9)
        both = ScanTokens(
            *(
                torch.cat((part, rest[count:]))
                for part, rest in zip(tokens, filler, strict=True)
            )
        )
        expected, states = pool(sizes), pool(sizes)
        states[sizes.dummy_slot] = 1
        exact_y = function(tokens, layer, MAMBA, expected, real)
        y = function(both, layer, MAMBA, states, padded)
        assert y.isfinite().all()
        assert_budgeted("chunk_scan", y[:count], exact_y)
        assert states[sizes.dummy_slot].isfinite().all()
        used = slice(0, sizes.dummy_slot)
        assert_budgeted("chunk_scan_state", states[used], expected[used])


def test_a_row_of_nan_harms_no_other() -> None:
    """What goes wrong in a row stays in it, also in the chunks beside it."""
    sizes, layer = make_sizes(), parameters()
    step = make_step(sizes, [], [Slice(3, 20), Slice(5, 40), Slice(9, 12)])
    batch = build("optimized", sizes, step, all_logits=False)
    good, bad = pool(sizes), pool(sizes)
    bad[step[0].rows[1].slot_id] = torch.nan
    tokens = scan_tokens(MAMBA, 55)
    tokens.x[17:52], tokens.dt[17:52] = torch.inf, torch.nan
    healthy = scan_tokens(MAMBA, 55)
    scan = load("optimized", "scan").scan_prefill
    y, expected = (
        scan(part, layer, MAMBA, states, batch)
        for part, states in ((tokens, bad), (healthy, good))
    )
    assert y[17:52].isnan().any()
    for rows in (slice(0, 17), slice(52, 55)):
        assert_same_order(y[rows], expected[rows])
    for row in (step[0].rows[0], step[0].rows[2]):
        assert_same_order(bad[row.slot_id], good[row.slot_id])


def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never waits for a number from the device."""
    sizes, layer = make_sizes(), parameters()
    step = make_step(sizes, [Slice(7, 8)], [Slice(3, 40, snapshots=[16, 32])])
    batch, states = build("optimized", sizes, step, all_logits=False), pool(sizes)
    scan = load("optimized", "scan")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a device tensor is read")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    scan.scan_decode(scan_tokens(MAMBA, 1), layer, MAMBA, states, batch)
    scan.scan_prefill(scan_tokens(MAMBA, 37), layer, MAMBA, states, batch)
