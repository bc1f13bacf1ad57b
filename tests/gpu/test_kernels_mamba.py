"""Kernels of the Mamba side at real sizes, against the loop in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig
from lockstep.memory import SCAN_CHUNK_SIZES, Caches
from lockstep.parameters import MambaParameters
from tests.factories import load
from tests.host_reads import no_host_reads
from tests.kernels.tiers import load_kernels
from tests.padded import place, split
from tests.plans import Padding, Slice, Step, build, build_padded, make_sizes, make_step
from tests.tolerances import assert_budgeted, assert_equal

pytestmark = pytest.mark.gpu

NANO3 = MambaConfig(num_heads=64, head_dim=64, state_size=128, num_groups=8)
#: Heads that leave shared memory for one stage alone.
WIDE = MambaConfig(num_heads=8, head_dim=128, state_size=256, num_groups=2)
CHANNELS = NANO3.conv_channels
DTYPES = (torch.float32, torch.bfloat16)
STATE = (NANO3.num_heads, NANO3.head_dim, NANO3.state_size)
EPS = 1e-5
#: Numbers between two slots of a pool in which the second is out of reach of 32 bits.
FAR = 2**31 + 16


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    """Make and fill everything there."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers; views of them begin wherever they begin."""
    return torch.randn(shape, device="cuda").to(dtype)


def parameters(is_slow: bool = False, config: MambaConfig = NANO3) -> MambaParameters:
    """Draw what a scan reads of a layer; slow ones remember a thousand tokens."""
    heads = config.num_heads
    rates = -(1 + 15 * torch.rand(heads)) / (100 if is_slow else 1)
    given: Any = dict.fromkeys(MambaParameters.__dataclass_fields__)
    given |= {"A": rates, "dt_bias": randn(heads) - 2, "D": randn(heads)}
    layer = object.__new__(MambaParameters)
    for name, value in given.items():
        object.__setattr__(layer, name, value)
    return layer


def tokens_of(
    count: int, dtype: torch.dtype, config: MambaConfig = NANO3
) -> ScanTokens:
    """Draw tokens as views of wider rows."""
    groups = config.num_groups * config.state_size
    rows = randn(count, config.conv_channels, dtype=dtype)
    x, B, C = rows.split([config.inner_size, groups, groups], dim=1)
    dt = randn(count, 200, dtype=dtype)[:, 80 : 80 + config.num_heads]
    return ScanTokens(
        x.unflatten(1, (config.num_heads, -1)),
        dt,
        *(part.unflatten(1, (config.num_groups, -1)) for part in (B, C)),
    )


def ragged(chunk: int) -> Step:
    """Make rows of both kinds, prompts of all edge lengths, with states stored."""
    sizes = make_sizes(chunk)
    lengths = (1, 3, chunk - 1, chunk, chunk + 1, 2 * chunk + 5, 301)
    pieces = [Slice(0, length) for length in lengths]
    pieces += [Slice(start, start + 150) for start in (chunk, 2 * chunk - 2)]
    for piece in pieces:
        inside = range((piece.start // chunk + 1) * chunk, piece.end + 1, chunk)
        piece.snapshots = [*inside][-2:]
    decodes = [Slice(9 + i, 10 + i) for i in range(5)]
    return make_step(sizes, decodes, pieces)


def states_of(slots: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw states for all slots but the last two, which hold zero and NaN."""
    states = randn(slots, *shape, dtype=dtype)
    states[-2], states[-1] = 0, torch.nan
    return states


def run_scan(
    scan: Any,
    tokens: ScanTokens,
    layer: MambaParameters,
    config: MambaConfig,
    states: Tensor,
    batch: BatchMetadata,
) -> Tensor:
    """Scan the real tokens of both kinds, among NaN."""
    parts = [split(place(part, batch), batch) for part in tokens]
    decoding, prefilling = (ScanTokens(*each) for each in zip(*parts, strict=True))
    given = layer, config, states, batch
    y = scan.scan_decode(decoding, *given), scan.scan_prefill(prefilling, *given)
    return torch.cat(y)[batch.token_mask]


def wide(layer: MambaParameters) -> MambaParameters:
    """Widen what a scan reads."""
    A, dt_bias, D = (part.double() for part in (layer.A, layer.dt_bias, layer.D))
    return replace(layer, A=A, dt_bias=dt_bias, D=D)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", SCAN_CHUNK_SIZES)
@pytest.mark.parametrize("is_slow", [False, True])
def test_scans(chunk: int, dtype: torch.dtype, is_slow: bool) -> None:
    """Outputs and states within their budgets, at padded shapes."""
    assert_scans(replace(NANO3, scan_chunk_size=chunk), dtype, is_slow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_wide_scans(chunk: int, dtype: torch.dtype) -> None:
    """Heads and states twice as wide, for which tiles are others."""
    assert_scans(replace(WIDE, scan_chunk_size=chunk), dtype, is_slow=False)


def assert_scans(config: MambaConfig, dtype: torch.dtype, is_slow: bool) -> None:
    """Compare a step of ragged rows with the loop in float64."""
    chunk = config.scan_chunk_size
    sizes, step = make_sizes(chunk), ragged(chunk)
    real = build("reference", sizes, step, all_logits=False)
    batch = build_padded(sizes, step, Padding(2, 3, 77))
    tokens = tokens_of(real.shape.tokens, dtype, config)
    layer = parameters(is_slow, config)
    shape = config.num_heads, config.head_dim, config.state_size
    states = states_of(sizes.num_slots, torch.float32, *shape)
    truth = states.double()
    kernels, loop = load_kernels("optimized", "scan"), load("reference", "scan")
    y = run_scan(kernels, tokens, layer, config, states, batch)
    exact_tokens = ScanTokens(*(part.double() for part in tokens))
    exact = run_scan(loop, exact_tokens, wide(layer), config, truth, real)
    assert y.dtype == dtype
    assert_budgeted("kernel_scan", y, exact)
    written = torch.cat((real.prefill_slot_ids, real.snapshot_slot_ids))
    others = torch.ones(sizes.num_slots, dtype=torch.bool)
    others[written], others[-1] = False, False
    assert_budgeted("kernel_scan_state", states[written].to(dtype), truth[written])
    # Of a decode step nothing is in the dtype of the model but its inputs.
    assert_budgeted("scan_state", states[others], truth[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions(dtype: torch.dtype) -> None:
    """Outputs within their budget; windows bit for bit."""
    sizes, step = make_sizes(128), ragged(128)
    real = build("reference", sizes, step, all_logits=False)
    batch = build_padded(sizes, step, Padding(2, 3, 77))
    inputs = randn(real.shape.tokens, CHANNELS + 96, dtype=dtype)[:, 32:-64]
    layer = randn(CHANNELS, 4, dtype=dtype), randn(CHANNELS, dtype=dtype)
    windows = states_of(sizes.num_slots, dtype, CHANNELS, 3)
    exact_windows = windows.double()

    def run(conv: Any, inputs: Tensor, layer: Any, pool: Tensor, batch: Any) -> Tensor:
        decoding, prefilling = split(place(inputs, batch), batch)
        decoded = conv.conv_decode(decoding, *layer, pool, batch)
        prefilled = conv.conv_prefill(prefilling, *layer, pool, batch)
        return torch.cat((decoded, prefilled))[batch.token_mask]

    y = run(load_kernels("optimized", "conv1d"), inputs, layer, windows, batch)
    exact_layer = layer[0].double(), layer[1].double()
    loop = load("reference", "conv1d")
    exact = run(loop, inputs.double(), exact_layer, exact_windows, real)
    assert_budgeted("conv", y, exact)
    assert_equal(windows[:-1].double(), exact_windows[:-1])


def test_windows_beyond_32_bits() -> None:
    """A pool whose slots are far apart works as one whose slots are neighbours."""
    dtype, slots = torch.bfloat16, 3
    near = randn(slots, CHANNELS, 3, dtype=dtype)
    memory = torch.full(((slots - 1) * FAR + near[0].numel(),), torch.nan, dtype=dtype)
    far = memory.as_strided(near.shape, (FAR, 3, 1)).copy_(near)
    assert far[1].storage_offset() > 2**31
    kernels = load_kernels("optimized", "conv1d")
    inputs, layer = randn(7, CHANNELS, dtype=dtype), randn(CHANNELS, 4, dtype=dtype)
    decode: Any = SimpleNamespace(decode_slot_ids=torch.tensor([1, 2]))
    # Stores both the state after five tokens, and that after two in the first slot.
    prefill: Any = SimpleNamespace(
        cu_prefill_lens=torch.tensor([0, 5]),
        prefill_slot_ids=torch.tensor([1]),
        initial_slot_ids=torch.tensor([1]),
        cu_scan_chunks=torch.tensor([0, 5]),
        scan_chunk_rows=torch.tensor([0]),
        snapshot_rows=torch.tensor([0]),
        snapshot_ends=torch.tensor([2]),
        snapshot_slot_ids=torch.tensor([0]),
    )
    before = near.clone()
    for run, given, batch, real in (
        (kernels.conv_decode, inputs[:2], decode, 1),
        (kernels.conv_prefill, inputs[2:], prefill, 5),
    ):
        outputs = [run(given, layer, None, pool, batch)[:real] for pool in (near, far)]
        assert_equal(outputs[1], outputs[0])
        assert bool((near[1] != before[1]).any())
        assert_equal(far, near)
    assert bool((near[0] != before[0]).any())
    assert_equal(near[2], before[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 300])
def test_norms(dtype: torch.dtype, count: int) -> None:
    """At the widths of the model, of a head, and of groups."""
    kernels, loop = load_kernels("optimized", "norm"), load("reference", "norm")
    for width in (2688, 128):
        rows = [randn(count, width, dtype=dtype) for _ in range(2)]
        weight = randn(width, dtype=dtype)
        exact = loop.rms_norm(rows[0].double(), weight.double(), EPS)
        assert_budgeted("rms_norm", kernels.rms_norm(rows[0], weight, EPS), exact)
        total, normed = kernels.add_rms_norm(*rows, weight, EPS)
        assert_equal(total, rows[0] + rows[1])
        exact = loop.rms_norm(total.double(), weight.double(), EPS)
        assert_budgeted("rms_norm", normed, exact)
    width = NANO3.inner_size
    hidden, weight = randn(count, width, dtype=dtype), randn(width, dtype=dtype)
    gate = randn(count, width + CHANNELS + 64, dtype=dtype)[:, :width]
    given = hidden, gate, weight
    actual = kernels.gated_group_rms_norm(*given, EPS, 8)
    exact = loop.gated_group_rms_norm(*(part.double() for part in given), EPS, 8)
    assert_budgeted("gated_group_rms_norm", actual, exact)


def test_copies() -> None:
    """Bit for bit, NaN too, and nothing else moves."""
    slots, dummy = 9, 8
    conv = states_of(slots, torch.bfloat16, CHANNELS, 3)
    ssm = states_of(slots, torch.float32, *STATE)
    caches = Caches(torch.zeros(0), *(torch.stack((p, p + 1)) for p in (conv, ssm)))
    expected = [pool.clone() for pool in caches.tensors()[1:]]
    sources, targets = [2, 0, dummy, 3], [dummy, 7, dummy, 5]
    for pool in expected:
        pool[:, 7], pool[:, 5] = pool[:, 0], pool[:, 3]
    copy_states = load_kernels("optimized", "snapshots").copy_states
    with no_host_reads():
        copy_states(caches, torch.tensor(sources), torch.tensor(targets), dummy)
    for actual, wanted in zip(caches.tensors()[1:], expected, strict=True):
        assert_equal(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_company_and_cuts_change_no_bit(
    dtype: torch.dtype, pool_dtype: torch.dtype, chunk: int
) -> None:
    """A row alone, in company, again or cut at a chunk gives the same."""
    sizes, layer = make_sizes(chunk), parameters()
    config = replace(NANO3, scan_chunk_size=chunk)
    scan = load_kernels("optimized", "scan").scan_prefill
    length, before = 3 * chunk + 7, 2 * chunk + 30
    tokens = tokens_of(before + length, dtype)
    boundary = 2 * chunk

    def run(rows: list[Slice], first: int, end: int) -> tuple[Tensor, Tensor]:
        step = make_step(sizes, [], rows)
        batch = build_padded(sizes, step, Padding(len(rows), 0, 9))
        states = states_of(sizes.num_slots, pool_dtype, *STATE)
        row = step[0].rows[-1]
        states[row.initial_slot_id] = carried
        part = ScanTokens(*(place(p[first:end], batch) for p in tokens))
        y = scan(part, layer, config, states, batch)[batch.token_mask]
        snapshots = [states[plan.slot_id] for plan in row.snapshots]
        return y[-(row.end - row.start) :], torch.stack(
            [*snapshots, states[row.slot_id]]
        )

    carried = torch.zeros(STATE, dtype=pool_dtype)
    mine = Slice(0, length, snapshots=[boundary])
    alone = run([mine], before, before + length)
    for _ in range(2):
        company = run([Slice(5, 5 + before), mine], 0, before + length)
        for actual, expected in zip(company, alone, strict=True):
            assert_equal(actual, expected)
    carried = alone[1][0]
    rest = run([Slice(boundary, length)], before + boundary, before + length)
    assert_equal(rest[0], alone[0][boundary:])
    assert_equal(rest[1][0], alone[1][1])


def test_replays_of_a_graph_are_eager_steps() -> None:
    """Captured once, replayed on other numbers at the same addresses, bit for bit."""
    sizes, layer = make_sizes(128), parameters()
    step, filters = ragged(128), (randn(CHANNELS, 4), randn(CHANNELS))
    batch = build_padded(sizes, step, Padding(1, 2, 40))
    kernels, conv = (load_kernels("optimized", name) for name in ("scan", "conv1d"))
    pools = [
        states_of(sizes.num_slots, torch.float32, *shape)
        for shape in (STATE, (CHANNELS, 3))
    ]
    inputs = place(randn(batch.shape.tokens, CHANNELS), batch)
    dt = place(randn(batch.shape.tokens, NANO3.num_heads), batch)

    def forward() -> list[Tensor]:
        outputs = []
        for conv_kind, scan_kind, part, steps in zip(
            (conv.conv_decode, conv.conv_prefill),
            (kernels.scan_decode, kernels.scan_prefill),
            split(inputs, batch),
            split(dt, batch),
            strict=True,
        ):
            mixed = conv_kind(part, *filters, pools[1], batch)
            groups = NANO3.num_groups * NANO3.state_size
            x, B, C = mixed.split([NANO3.inner_size, groups, groups], dim=1)
            by_group = [p.unflatten(1, (NANO3.num_groups, -1)) for p in (B, C)]
            heads = x.unflatten(1, (NANO3.num_heads, -1))
            scanned = ScanTokens(heads, steps, *by_group)
            outputs.append(scan_kind(scanned, layer, NANO3, pools[0], batch))
        return outputs

    with no_host_reads():
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    fresh = [pool.clone() for pool in pools]
    for _ in range(2):
        inputs.normal_()
        for pool, start in zip(pools, fresh, strict=True):
            pool.copy_(start)
        expected = torch.cat(forward())[batch.token_mask]
        states = [pool.clone() for pool in pools]
        for pool, start in zip(pools, fresh, strict=True):
            pool.copy_(start)
        for output in captured:
            output.fill_(torch.nan)
        graph.replay()
        assert_equal(torch.cat(captured)[batch.token_mask], expected)
        for pool, wanted in zip(pools, states, strict=True):
            assert_equal(pool[:-1], wanted[:-1])
