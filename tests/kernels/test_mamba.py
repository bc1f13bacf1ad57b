"""Kernels of the Mamba side against the loop, as the torch tier is held to it.

Without a GPU, Triton's interpreter runs them: a program takes about 9 ms, and bfloat16
is wrong there. So sizes are small, and all is float32.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lockstep.errors import ConfigError
from tests.equivalence import test_conv1d, test_norm, test_scan, test_snapshots
from tests.factories import MAMBA, randn, scan_tokens, take
from tests.kernels.tiers import load_kernels, use_kernels
from tests.padded import place, split
from tests.plans import Padding, Slice, Step, build, build_padded, make_sizes, make_step
from tests.tolerances import assert_budgeted, assert_equal, assert_same_order

F32 = torch.float32
SIZES = make_sizes()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in all that is borrowed from the tests of the torch tier."""
    use_kernels(monkeypatch, test_conv1d, test_norm, test_scan, test_snapshots)


@pytest.mark.parametrize(("count", "width"), [(0, 19), (1, 6), (17, 19), (3, 130)])
def test_norms(count: int, width: int) -> None:
    """Any number of tokens of any width."""
    test_norm.test_twins(count, width, F32)
    test_norm.test_adding_twins(count, F32, F32)


@pytest.mark.parametrize(("count", "width", "groups"), [(3, 30, 3), (2, 66, 1)])
def test_gated_norms(count: int, width: int, groups: int) -> None:
    """Groups that no tile fits, and one of all features."""
    test_norm.test_gated_twins(count, width, groups, F32)


def test_rows_of_wider_rows_are_normed() -> None:
    """Rows may be views, as gates are of a projection."""
    norm, weight = load_kernels("optimized", "norm"), randn(30, seed=3)
    wide = randn(5, 47)
    hidden, gate = wide[:, 2:32], wide[:, 17:]
    for name, rows in (("rms_norm", [hidden]), ("add_rms_norm", [hidden, gate])):
        function = getattr(norm, name)
        actual = function(*rows, weight, test_norm.EPS)
        expected = function(*(r.contiguous() for r in rows), weight, test_norm.EPS)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same_order(mine, theirs)
    gated = norm.gated_group_rms_norm
    assert_same_order(
        gated(hidden, gate, weight, test_norm.EPS, 3),
        gated(hidden.contiguous(), gate.contiguous(), weight, test_norm.EPS, 3),
    )


def test_norms_keep_nan_apart() -> None:
    """Padding may hold anything."""
    test_norm.test_tokens_of_nan_harm_no_other()


def test_copies() -> None:
    """Real targets alone are copied, in any order."""
    dummy = test_snapshots.DUMMY
    sources, targets = [2, 0, dummy, 3], [dummy, 7, dummy, 5]
    for actual, expected in zip(
        test_snapshots.copy("optimized", sources, targets),
        test_snapshots.copy("reference", sources, targets),
        strict=True,
    ):
        assert_equal(actual, expected)


@pytest.mark.parametrize(("width", "start"), [(2, 0), (4, 5), (7, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_convolutions(width: int, start: int, has_bias: bool) -> None:
    """Rows shorter than the window and longer than a tile, and rows that decode."""
    prefills = test_conv1d.edge_slices(width, start)
    step = make_step(SIZES, [Slice(7, 8), Slice(1, 2)], prefills)
    batch = build("optimized", SIZES, step, all_logits=False)
    test_conv1d.assert_twins(batch, width=width, has_bias=has_bias)


def test_many_decode_rows_are_convolved() -> None:
    """More rows than a tile holds, none of which is whole."""
    test_conv1d.test_rows_of_one_kind(7, is_decode=True)


def test_windows_are_read_before_any_is_written() -> None:
    """A row may start from its own slot, from another's, and be shorter than both."""
    test_conv1d.test_initial_windows_are_read_before_any_is_written()
    step = make_step(SIZES, [], [Slice(15, 17, snapshots=[16]), Slice(31, 32)])
    batch = build("optimized", SIZES, step, all_logits=False)
    first, second = step[0].rows
    crossed = torch.tensor([second.slot_id, first.slot_id])
    states, layer, inputs = test_conv1d.pool(), test_conv1d.parameters(4), randn(3, 13)
    expected = states.clone()
    expected[[first.slot_id, second.slot_id]] = states[crossed]
    test_conv1d.run(
        "optimized", inputs, layer, states, replace(batch, initial_slot_ids=crossed)
    )
    test_conv1d.run("reference", inputs, layer, expected, batch)
    assert_equal(states[: SIZES.dummy_slot], expected[: SIZES.dummy_slot])


def test_a_convolved_row_of_nan_harms_no_other() -> None:
    """What goes wrong in a row stays in it."""
    test_conv1d.test_a_row_of_nan_harms_no_other()


def scan_step(chunk: int, start: int) -> Step:
    """Make slices of few edge lengths, states stored wherever possible."""
    sizes = make_sizes(chunk)
    lengths = (3, chunk + 1) if chunk > 64 else (1, chunk - 1, chunk + 1, 2 * chunk + 5)
    pieces = [Slice(start + i, start + i + n) for i, n in enumerate(lengths)]
    for piece in pieces:
        piece.snapshots = test_scan.boundaries(piece, sizes)
        piece.is_resumed = piece.end % 2 > 0 and piece.start > 0
    return make_step(sizes, [], pieces)


@pytest.mark.parametrize("chunk", test_scan.CHUNKS)
@pytest.mark.parametrize("is_slow", [False, True])
def test_scans(chunk: int, is_slow: bool) -> None:
    """Ragged rows, from the beginning and within a chunk; fast decays and slow."""
    sizes = make_sizes(chunk)
    step = scan_step(chunk, chunk - 2 if is_slow else 0)
    batch = build("reference", sizes, step, all_logits=False)
    tokens = scan_tokens(MAMBA, test_scan.num_prefilled(batch))
    test_scan.compare(
        "scan_prefill",
        tokens,
        batch,
        test_scan.pool(sizes),
        test_scan.parameters(is_slow),
        scan_chunk_size=chunk,
    )


@pytest.mark.parametrize("limit", [(0.0, 0.2), (0.5, 0.6)])
def test_time_steps_are_clamped(limit: tuple[float, float]) -> None:
    """Empty lanes stay empty where the range of time steps excludes zero."""
    batch = build("reference", SIZES, scan_step(16, 5), all_logits=False)
    tokens = scan_tokens(MAMBA, test_scan.num_prefilled(batch))
    test_scan.compare(
        "scan_prefill",
        tokens,
        batch,
        test_scan.pool(SIZES),
        scan_chunk_size=16,
        time_step_limit=limit,
    )


@pytest.mark.parametrize("count", [0, 1, 7])
def test_decode_rows_are_scanned(count: int) -> None:
    """None, one, many."""
    test_scan.test_decode_rows(count, F32)


@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_resuming_at_a_chunk_is_going_on(dtype: torch.dtype) -> None:
    """States are handed on as they are stored, so a cut there changes no bit.

    Float64 tokens and a float32 pool show the rounding.
    """
    layer, tokens = test_scan.parameters(), scan_tokens(MAMBA, 59, dtype=dtype)
    whole, cut = test_scan.pool(SIZES), test_scan.pool(SIZES)

    def run(states: torch.Tensor, first: int, end: int) -> torch.Tensor:
        step = make_step(SIZES, [], [Slice(first, end)])
        batch = build("optimized", SIZES, step, all_logits=False)
        part = take(tokens, first - 32, end - 32)
        scan = load_kernels("optimized", "scan").scan_prefill
        return scan(part, layer, MAMBA, states, batch)

    expected = run(whole, 32, 91)
    pieces = [run(cut, *ends) for ends in pairwise((32, 48, 64, 91))]
    assert_same_order(torch.cat(pieces), expected)
    assert_same_order(cut, whole)


def test_a_scanned_row_of_nan_harms_no_other() -> None:
    """What goes wrong in a row stays in it, also in the chunks beside it."""
    test_scan.test_a_row_of_nan_harms_no_other()


@pytest.mark.parametrize("padding", [Padding(2, 3, 5), Padding(0, 0, 21), Padding(1)])
def test_padding_changes_nothing(padding: Padding) -> None:
    """Among NaN real rows give the same, and only the dummy slot may take any."""
    step = make_step(
        SIZES,
        [Slice(7, 8), Slice(40, 41)],
        [Slice(3, 20, snapshots=[16]), Slice(9, 11), Slice(16, 48, snapshots=[32])],
    )
    real = build("optimized", SIZES, step, all_logits=False)
    padded = build_padded(SIZES, step, padding)
    layer, filters = test_scan.parameters(), test_conv1d.parameters(4)
    tokens, inputs = scan_tokens(MAMBA, real.shape.tokens), randn(53, 13)
    expected, states = test_scan.pool(SIZES), test_scan.pool(SIZES)
    expected_windows, windows = test_conv1d.pool(), test_conv1d.pool()
    wanted = test_conv1d.run("optimized", inputs, filters, expected_windows, real)
    actual = test_conv1d.run("optimized", inputs, filters, windows, padded)
    assert_budgeted("conv", actual, wanted)
    assert_equal(windows[: SIZES.dummy_slot], expected_windows[: SIZES.dummy_slot])
    scan = load_kernels("optimized", "scan")
    outputs = []
    for batch, pool in ((real, expected), (padded, states)):
        parts = [split(place(part, batch), batch) for part in tokens]
        decoding, prefilling = (
            type(tokens)(*each) for each in zip(*parts, strict=True)
        )
        given = layer, MAMBA, pool, batch
        y = scan.scan_decode(decoding, *given), scan.scan_prefill(prefilling, *given)
        outputs.append(torch.cat(y)[batch.token_mask])
    assert outputs[0].isfinite().all()
    assert_same_order(outputs[1], outputs[0])
    assert_same_order(states[: SIZES.dummy_slot], expected[: SIZES.dummy_slot])


def test_other_scan_chunks_are_refused() -> None:
    """There are tiles for powers of two alone."""
    batch = build("optimized", SIZES, scan_step(16, 0), all_logits=False)
    config = replace(MAMBA, scan_chunk_size=24)
    scan = load_kernels("optimized", "scan").scan_prefill
    tokens = scan_tokens(MAMBA, test_scan.num_prefilled(batch))
    with pytest.raises(ConfigError, match="scan_chunk_size is 24"):
        scan(tokens, test_scan.parameters(), config, test_scan.pool(SIZES), batch)
