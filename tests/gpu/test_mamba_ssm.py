"""The kernels of ``mamba_ssm`` and ``causal_conv1d`` themselves, and engines of them.

Both packages must be on the path, or all fails. They are no part of the environment, so
this file is run by itself::

    LOCKSTEP_TEST_DEVICE=cuda python -m pytest -m gpu tests/gpu/test_mamba_ssm.py

But in one test, ``mamba_ssm`` does not try its tiles, which takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import DTypeName
from lockstep.optimized import packages
from lockstep.trace import StepRecord
from tests.factories import DEVICE, load
from tests.following import Ties, Twin, follow, twin_of
from tests.gpu.test_kernels_mamba import (
    CHANNELS,
    NANO3,
    STATE,
    parameters,
    ragged,
    randn,
    run_scan,
    states_of,
    tokens_of,
    wide,
)
from tests.host_reads import no_host_reads
from tests.matrix import (
    ALL,
    MODELS,
    SCAN_CHUNK,
    Recording,
    Row,
    Taken,
    expected_events,
    options,
    recorded,
    seen_events,
)
from tests.padded import place, split
from tests.plans import Padding, Slice, build, build_padded, make_sizes, make_step
from tests.tolerances import (
    assert_budgeted,
    assert_equal,
    assert_package_logprobs,
)

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = (F32, BF16)
GRAPHS = ("off", "decode")
#: In bfloat16 operands round far more than their sums do, as in any kernel.
BUDGETS = {
    F32: ("package_scan", "package_scan_state"),
    BF16: ("kernel_scan", "kernel_scan_state"),
}
#: No width is a power of two, and rows of a projection begin where none can be loaded.
_TINY = MODELS["hybrid"].mamba
assert _TINY is not None
TINY = replace(
    MODELS["hybrid"], mamba=replace(_TINY, head_dim=12, state_size=10, num_groups=2)
)


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw alike; settle tiles without timing them."""
    assert DEVICE.type == "cuda", "set LOCKSTEP_TEST_DEVICE=cuda"
    torch.manual_seed(0)
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")


@pytest.fixture
def tuned(on_the_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``mamba_ssm`` try its tiles, as it does unless told otherwise."""
    monkeypatch.delenv("MAMBA_DETERMINISTIC")
    packages._operators.cache_clear()
    yield
    packages._operators.cache_clear()


def check_scans(chunk: int, dtype: torch.dtype, is_slow: bool) -> None:
    """Hold outputs and states of rows of both kinds to their budgets, among padding."""
    sizes, step = make_sizes(chunk), ragged(chunk)
    config = replace(NANO3, scan_chunk_size=chunk)
    real = build("reference", sizes, step, all_logits=False)
    batch = build_padded(sizes, step, Padding(2, 3, 77))
    tokens, layer = tokens_of(real.shape.tokens, dtype), parameters(is_slow)
    states = states_of(sizes.num_slots, F32, *STATE)
    truth = states.double()
    y = run_scan(packages, tokens, layer, config, states, batch)
    exact_tokens = ScanTokens(*(part.double() for part in tokens))
    loop = load("reference", "scan")
    exact = run_scan(loop, exact_tokens, wide(layer), config, truth, real)
    assert y.dtype == dtype
    written = torch.cat((real.prefill_slot_ids, real.snapshot_slot_ids))
    outputs, kept = BUDGETS[dtype]
    assert_budgeted(outputs, y, exact)
    assert_budgeted(kept, states[written].to(dtype), truth[written])
    others = torch.ones(sizes.num_slots, dtype=torch.bool)
    others[written], others[-1] = False, False
    assert_budgeted("package_step_state", states[others], truth[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [128, 256])
@pytest.mark.parametrize("is_slow", [False, True])
def test_scans(chunk: int, dtype: torch.dtype, is_slow: bool) -> None:
    """Rows of all edge lengths, with stored states; decays fast and slow."""
    check_scans(chunk, dtype, is_slow)


def test_scans_with_tiles_that_were_tried(tuned: None) -> None:
    """The kernels are those that an engine runs."""
    check_scans(NANO3.scan_chunk_size, BF16, is_slow=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [32, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_convolutions(dtype: torch.dtype, offset: int, has_bias: bool) -> None:
    """Outputs within their budget, windows bit for bit, wherever rows begin."""
    sizes, step = make_sizes(128), ragged(128)
    real = build("reference", sizes, step, all_logits=False)
    batch = build_padded(sizes, step, Padding(2, 3, 77))
    weight, bias = randn(CHANNELS, 4, dtype=dtype), randn(CHANNELS, dtype=dtype)
    states = states_of(sizes.num_slots, dtype, CHANNELS, 3)
    exact_states = states.double()
    inputs = place(randn(real.shape.tokens, CHANNELS + 97, dtype=dtype), batch)
    inputs = inputs[:, offset : offset + CHANNELS]

    def run(conv: Any, parts: Any, layer: Any, pool: Tensor, on: Any) -> Tensor:
        decoded = conv.conv_decode(parts[0], *layer, pool, on)
        prefilled = conv.conv_prefill(parts[1], *layer, pool, on)
        return torch.cat((decoded, prefilled))[on.token_mask]

    layer = weight, bias if has_bias else None
    y = run(packages, split(inputs, batch), layer, states, batch)
    layer = weight.double(), bias.double() if has_bias else None
    exact_inputs = split(inputs[batch.token_mask].double(), real)
    loop = load("reference", "conv1d")
    exact = run(loop, exact_inputs, layer, exact_states, real)
    assert y.dtype == dtype
    assert_budgeted("package_conv", y, exact)
    assert_equal(states[:-1].double(), exact_states[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_going_on_from_a_stored_state_changes_no_bit(dtype: torch.dtype) -> None:
    """What is handed on within a row is what is stored."""
    sizes, layer, stop, length = make_sizes(128), parameters(), 256, 391
    tokens, weight = tokens_of(length, dtype), randn(CHANNELS, 4, dtype=dtype)
    inputs = randn(length, CHANNELS, dtype=dtype)
    pools = [
        (states_of(sizes.num_slots, F32, *STATE),) * 2,
        (states_of(sizes.num_slots, dtype, CHANNELS, 3),) * 2,
    ]
    pools = [[pool.clone() for pool in pair] for pair in pools]

    def run(which: int, piece: Slice) -> list[Tensor]:
        batch = build(
            "optimized", sizes, make_step(sizes, [], [piece]), all_logits=False
        )
        span = slice(piece.start, piece.end)
        part = ScanTokens(*(each[span] for each in tokens))
        return [
            packages.scan_prefill(part, layer, NANO3, pools[0][which], batch),
            packages.conv_prefill(inputs[span], weight, None, pools[1][which], batch),
        ]

    whole = run(0, Slice(0, length, snapshots=[stop]))
    pieces = zip(run(1, Slice(0, stop)), run(1, Slice(stop, length)), strict=True)
    for actual, expected in zip(map(torch.cat, pieces), whole, strict=True):
        assert_equal(actual, expected)
    slot = make_step(sizes, [], [Slice(0, length)])[0].rows[0].slot_id
    for expected, actual in pools:
        assert_equal(actual[slot], expected[slot])


@pytest.mark.parametrize("dtype", DTYPES)
def test_replays_of_decode_steps_are_eager_steps(dtype: torch.dtype) -> None:
    """Captured once, replayed on other numbers at the same addresses, bit for bit."""
    sizes, layer = make_sizes(128), parameters()
    weight, bias = randn(CHANNELS, 4, dtype=dtype), randn(CHANNELS, dtype=dtype)
    step = make_step(sizes, [Slice(9 + i, 10 + i) for i in range(5)], [])
    batch: BatchMetadata = build_padded(sizes, step, Padding(0, 3))
    inputs = randn(batch.padded_shape.tokens, CHANNELS, dtype=dtype)
    dt = randn(batch.padded_shape.tokens, NANO3.num_heads, dtype=dtype)
    pools = [
        states_of(sizes.num_slots, dtype, CHANNELS, 3),
        states_of(sizes.num_slots, F32, *STATE),
    ]

    def forward() -> Tensor:
        mixed = packages.conv_decode(inputs, weight, bias, pools[0], batch)
        groups = NANO3.num_groups * NANO3.state_size
        x, *others = mixed.split([NANO3.inner_size, groups, groups], dim=1)
        B, C = (part.unflatten(1, (NANO3.num_groups, -1)) for part in others)
        tokens = ScanTokens(x.unflatten(1, (NANO3.num_heads, -1)), dt, B, C)
        return packages.scan_decode(tokens, layer, NANO3, pools[1], batch)

    with no_host_reads():
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    fresh = [pool.clone() for pool in pools]
    for _ in range(2):
        inputs.normal_()
        results: list[list[Tensor]] = []
        for replay in (False, True):
            for pool, start in zip(pools, fresh, strict=True):
                pool.copy_(start)
            if replay:
                captured.fill_(torch.nan)
                graph.replay()
            y = captured if replay else forward()
            # In the dummy slot, padded rows overwrite each other in any order.
            results.append(
                [y[batch.token_mask], *(pool[:-1].clone() for pool in pools)]
            )
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_equal(actual, expected)


CASES = [
    ("cold", ALL, "prefill", False),
    ("warm", SCAN_CHUNK + 1, "mixed", False),
    ("full hit", ALL, "decode", False),
    ("second turn", SCAN_CHUNK + 1, "mixed", True),
    ("branch", SCAN_CHUNK - 1, "decode", False),
]
whole_engines = pytest.mark.parametrize(
    ("case", "graphs"), [(case, graphs) for case in CASES for graphs in GRAPHS]
)


def play(
    case: tuple[str, int, str, bool], graphs: str, dtype: DTypeName
) -> tuple[Row, Recording, Twin]:
    """Record what the reference does, and build an engine to do the same."""
    MODELS[f"packages {dtype}"] = replace(TINY, dtype=dtype)
    row = Row(f"packages {dtype}", *case, graphs)
    recording = recorded(replace(row, graphs="off"))
    assert not expected_events(row) - seen_events(row, recording)
    given = {**options(row), "kernels": "mamba-ssm"}
    return row, recording, twin_of(row.config, graphs, tuple(given.items()))


def assert_run_as_asked(records: list[StepRecord], graphs: str) -> None:
    """Check that decode steps were graphs, and that all others say why not."""
    records = [record for record in records if record.rows]
    assert any(record.shape.prefill_requests for record in records)
    for record in records:
        if graphs == "off":
            assert (record.mode, record.eager_reason) == ("eager", "")
        elif record.shape.prefill_requests:
            assert record.mode == "eager"
            assert 'graphs="decode"' in record.eager_reason
        else:
            assert (record.mode, record.eager_reason) == ("graph", "")


@whole_engines
def test_an_engine_follows_the_reference(
    case: tuple[str, int, str, bool], graphs: str
) -> None:
    """In float32: cold, cached, cut, preempted; every number that is kept."""
    _, recording, twin = play(case, graphs, "float32")
    records = follow(recording, twin, ties := Ties(), planned=False)
    assert ties.tokens > ties.ties
    assert_run_as_asked(records, graphs)


@whole_engines
def test_an_engine_of_short_numbers_follows_the_reference(
    case: tuple[str, int, str, bool], graphs: str
) -> None:
    """In bfloat16, where products of rounded operands have a class of their own."""
    _, recording, twin = play(case, graphs, "bfloat16")
    twin.begin()
    records: list[StepRecord] = []
    for operation in recording.operations:
        if not isinstance(operation, Taken):
            twin.engine.add(operation.prompt, operation.sampling, operation.request_id)
            continue
        expected = operation.record
        records.append(twin.engine.step(tokens=expected.tokens))
        assert records[-1].plan == expected.plan
        for name, values in expected.logprobs.items():
            assert_package_logprobs(records[-1].logprobs[name].cpu(), values)
    assert_run_as_asked(records, graphs)


def test_the_published_shape_is_not_refused() -> None:
    """The packages are there, and have it."""
    packages.check(NANO3, make_sizes(128), BF16, BF16, F32)
