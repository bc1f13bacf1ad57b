"""Kernels of ``mamba_ssm`` and ``causal_conv1d`` as components, against the loop.

Those of the first are interpreted, and bfloat16 is wrong there; for the second there is
a stand-in. Both at real sizes: tests/gpu/test_mamba_ssm.py.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.assemble import BACKENDS, KERNELS, PACKAGES, build_components
from lockstep.assemble import settle_options as settle
from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import EngineConfig, MambaConfig
from lockstep.errors import ConfigError
from lockstep.optimized import packages
from lockstep.parameters import MambaParameters
from tests.engines import assert_equals_lone, drain, greedy, make_engine
from tests.equivalence import test_scan
from tests.factories import MAMBA, load, randn, scan_tokens, take
from tests.kernels.package_stubs import stand_in
from tests.padded import place, split
from tests.plans import (
    Padding,
    Slice,
    Step,
    boundaries,
    build,
    build_padded,
    make_sizes,
    make_step,
)
from tests.scenarios.common import is_mixed, text, tiny
from tests.tolerances import assert_budgeted, assert_equal, assert_same_order

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="triton, which mamba_ssm imports, is built for Linux",
    ),
    pytest.mark.filterwarnings("ignore:Deterministic mode:UserWarning"),
]

F32, BF16 = torch.float32, torch.bfloat16
SIZES = make_sizes()
CHANNELS = MAMBA.conv_channels
#: The four components that these packages have.
OWN = {
    key: f"lockstep.optimized.{place}"
    for key, place in KERNELS["mamba-ssm"].items()
    if place.startswith("packages:")
}
SAMPLING = greedy(3)


@pytest.fixture(scope="module")
def _packages() -> Iterator[None]:
    with stand_in():
        yield


@pytest.fixture(autouse=True)
def installed(_packages: None) -> None:
    """Let all tests find the packages."""


def ragged(chunk: int, start: int) -> Step:
    """Make prompts of edge lengths, with states stored wherever they could be."""
    sizes = make_sizes(chunk)
    pieces = [Slice(start + i, start + i + n) for i, n in enumerate((1, 2, 3, chunk))]
    pieces += [Slice(chunk - 2, 2 * chunk + 5), Slice(2 * chunk, 3 * chunk)]
    for piece in pieces:
        piece.snapshots = boundaries(piece, sizes)
        piece.is_resumed = piece.end % 2 > 0 and piece.start > 0
    return make_step(sizes, [Slice(7, 8), Slice(40, 41)], pieces)


# Scans.


def run_scan(
    scan: Any,
    tokens: ScanTokens,
    layer: MambaParameters,
    config: MambaConfig,
    states: Tensor,
    batch: BatchMetadata,
) -> tuple[Tensor, Tensor]:
    """Scan the real tokens of both kinds of row, among NaN."""
    parts = [split(place(part, batch), batch) for part in tokens]
    decoding, prefilling = (ScanTokens(*each) for each in zip(*parts, strict=True))
    given = layer, config, states, batch
    decoded, prefilled = (
        scan.scan_decode(decoding, *given),
        scan.scan_prefill(prefilling, *given),
    )
    is_real = split(batch.token_mask, batch)
    return decoded[is_real[0]], prefilled[is_real[1]]


def assert_scans(step: Step, chunk: int, batch: BatchMetadata, **options: Any) -> None:
    """Hold outputs and states to their budgets; nothing else may be written."""
    sizes = make_sizes(chunk)
    config = replace(MAMBA, scan_chunk_size=chunk, **options)
    real = build("reference", sizes, step, all_logits=False)
    tokens, layer = scan_tokens(MAMBA, real.shape.tokens), test_scan.parameters()
    states = test_scan.pool(sizes)
    truth, before = states.double(), states.clone()
    stepped, scanned = run_scan(packages, tokens, layer, config, states, batch)
    exact_tokens = ScanTokens(*(part.double() for part in tokens))
    A, dt_bias, D = (part.double() for part in (layer.A, layer.dt_bias, layer.D))
    wide = replace(layer, A=A, dt_bias=dt_bias, D=D)
    loop = load("reference", "scan")
    exact = run_scan(loop, exact_tokens, wide, config, truth, real)
    assert_budgeted("package_step", stepped, exact[0])
    assert_budgeted("package_scan", scanned, exact[1])
    steps = real.decode_slot_ids
    scans = torch.cat((real.prefill_slot_ids, real.snapshot_slot_ids))
    assert_budgeted("package_step_state", states[steps], truth[steps])
    assert_budgeted("package_scan_state", states[scans], truth[scans])
    for slots in (steps, scans):
        states[slots] = before[slots]
    assert_equal(states[: sizes.dummy_slot], before[: sizes.dummy_slot])


@pytest.mark.parametrize(("chunk", "start"), [(16, 0), (16, 13), (64, 5)])
def test_scans(chunk: int, start: int) -> None:
    """Ragged rows, from the beginning and within a chunk, and rows that decode."""
    step = ragged(chunk, start)
    batch = build("optimized", make_sizes(chunk), step, all_logits=False)
    assert_scans(step, chunk, batch)


def test_padded_scans() -> None:
    """Padding is left out, or works on the dummy slot."""
    step = ragged(16, 3)
    assert_scans(step, 16, build_padded(SIZES, step, Padding(2, 3, 20)))


def test_time_steps_of_prompts_are_clamped() -> None:
    """The scan of prompts could; that of tokens could not, so it is refused."""
    layer, config = test_scan.parameters(), replace(MAMBA, time_step_limit=(0.5, 0.6))
    step = make_step(SIZES, [], [Slice(3, 40, snapshots=[32])])
    batch = build("optimized", SIZES, step, all_logits=False)
    tokens, states = scan_tokens(MAMBA, 37), test_scan.pool(SIZES)
    truth = states.double()
    y = packages.scan_prefill(tokens, layer, config, states, batch)
    exact = test_scan.exact("scan_prefill", tokens, layer, config, truth, batch)
    assert_budgeted("package_scan", y, exact)


def test_going_on_from_a_stored_state_changes_no_bit() -> None:
    """What is handed on is what is stored; a cut elsewhere is another order."""
    layer, tokens = test_scan.parameters(), scan_tokens(MAMBA, 59)
    for dtype in (F32, BF16):
        whole, cut = test_scan.pool(SIZES, dtype), test_scan.pool(SIZES, dtype)

        def run(states: Tensor, piece: Slice) -> Tensor:
            step = make_step(SIZES, [], [piece])
            batch = build("optimized", SIZES, step, all_logits=False)
            part = take(tokens, piece.start, piece.end)
            return packages.scan_prefill(part, layer, MAMBA, states, batch)

        expected = run(whole, Slice(0, 59, snapshots=[32]))
        pieces = [run(cut, Slice(0, 32)), run(cut, Slice(32, 59))]
        assert_same_order(torch.cat(pieces), expected)
        slot = make_step(SIZES, [], [Slice(0, 59)])[0].rows[0].slot_id
        assert_same_order(cut[slot], whole[slot])


# Convolutions.


def run_conv(
    conv: Any, inputs: Tensor, layer: Any, states: Tensor, batch: BatchMetadata
) -> Tensor:
    """Convolve the real tokens of both kinds of row, among NaN."""
    decoding, prefilling = split(place(inputs, batch), batch)
    decoded = conv.conv_decode(decoding, *layer, states, batch)
    prefilled = conv.conv_prefill(prefilling, *layer, states, batch)
    return torch.cat((decoded, prefilled))[batch.token_mask]


def windows(width: int, dtype: torch.dtype) -> Tensor:
    """Make a pool in which only live and stored windows are numbers, and zero."""
    shape = CHANNELS, width - 1
    states = torch.full((SIZES.num_slots, *shape), torch.nan, dtype=dtype)
    states[: SIZES.zero_slot] = randn(SIZES.zero_slot, *shape, dtype=dtype)
    states[SIZES.zero_slot] = 0
    return states


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("padding", [None, Padding(2, 3, 20)])
def test_convolutions(width: int, dtype: torch.dtype, padding: Padding | None) -> None:
    """Rows shorter than the window and longer; windows are equal bit for bit."""
    step = ragged(16, 13)
    real = build("reference", SIZES, step, all_logits=False)
    batch = build_padded(SIZES, step, padding) if padding else real
    inputs = randn(real.shape.tokens, CHANNELS, dtype=dtype)
    weight = randn(CHANNELS, width, seed=8, dtype=dtype)
    bias = randn(CHANNELS, seed=9, dtype=dtype) if padding else None
    states, expected = windows(width, dtype), windows(width, dtype).double()
    y = run_conv(packages, inputs, (weight, bias), states, batch)
    layer = weight.double(), None if bias is None else bias.double()
    loop = load("reference", "conv1d")
    exact = run_conv(loop, inputs.double(), layer, expected, real)
    assert y.dtype == dtype
    assert_budgeted("conv", y, exact)
    assert_equal(states.double()[: SIZES.dummy_slot], expected[: SIZES.dummy_slot])


@pytest.mark.parametrize(("before", "after"), [(0, 0), (8, 8), (3, 13), (8, 5), (2, 7)])
@pytest.mark.parametrize("length", [1, 21])
def test_inputs_that_are_part_of_wider_rows(
    before: int, after: int, length: int
) -> None:
    """At any distance from each other, and from where memory can be loaded at once."""
    step = make_step(SIZES, [], [Slice(5, 5 + length)])
    batch = build("optimized", SIZES, step, all_logits=False)
    wide = randn(length, before + CHANNELS + after)
    layer = randn(CHANNELS, 4, seed=8), None
    results = []
    for inputs in (wide[:, before : before + CHANNELS],) * 2:
        states = windows(4, F32)
        given = inputs.clone() if results else inputs
        results.append(
            (packages.conv_prefill(given, *layer, states, batch), states[:-1])
        )
    for mine, theirs in zip(*results, strict=True):
        assert_equal(mine, theirs)


def test_states_are_read_before_any_is_written() -> None:
    """A row may start from the slot that another one writes."""
    step = make_step(SIZES, [], [Slice(3, 20), Slice(5, 40), Slice(31, 32)])
    batch = build("optimized", SIZES, step, all_logits=False)
    slots = [row.slot_id for row in step[0].rows]
    turned = torch.tensor([*slots[1:], slots[0]])
    layer, inputs = (randn(CHANNELS, 4, seed=8), None), randn(53, CHANNELS)
    tokens, parameters = scan_tokens(MAMBA, 53), test_scan.parameters()
    for run, pool in (
        (lambda *on: packages.conv_prefill(inputs, *layer, *on), windows(4, F32)),
        (
            lambda *on: packages.scan_prefill(tokens, parameters, MAMBA, *on),
            test_scan.pool(SIZES),
        ),
    ):
        expected, states = pool.clone(), pool.clone()
        expected[slots] = pool[turned]
        assert_same_order(
            run(states, replace(batch, initial_slot_ids=turned)), run(expected, batch)
        )
        assert_same_order(states[slots], expected[slots])


def test_a_row_of_nan_harms_no_other() -> None:
    """What goes wrong in a row stays in it."""
    step = make_step(SIZES, [], [Slice(3, 20), Slice(5, 40), Slice(9, 12)])
    batch = build("optimized", SIZES, step, all_logits=False)
    layer, tokens = test_scan.parameters(), scan_tokens(MAMBA, 55)
    good, bad = test_scan.pool(SIZES), test_scan.pool(SIZES)
    expected = packages.scan_prefill(tokens, layer, MAMBA, good, batch)
    bad[step[0].rows[1].slot_id] = torch.nan
    tokens.x[17:52], tokens.dt[17:52] = torch.inf, torch.nan
    y = packages.scan_prefill(tokens, layer, MAMBA, bad, batch)
    assert y[17:52].isnan().any()
    for rows in (slice(0, 17), slice(52, 55)):
        assert_same_order(y[rows], expected[rows])


# Whole engines.


def test_an_engine_of_packages_equals_the_reference() -> None:
    """Prompts in company, one of them cut; then one again, from a stored state."""
    model = tiny("M*")
    engine = make_engine(
        model,
        "optimized",
        OWN,
        kernels="torch",
        max_requests=3,
        max_tokens_per_step=24,
    )
    for index, length in enumerate((18, 5, 40)):
        engine.add(text(length, seed=index), SAMPLING)
    run = drain(engine)
    assert any(map(is_mixed, run.records))
    again = engine.add(text(40, seed=2), SAMPLING)
    run = drain(engine, run)
    assert run.outputs[again].cache.num_skipped_tokens == 32
    for output in run.outputs.values():
        assert_equals_lone(model, output, run, SAMPLING)


def test_an_engine_that_preempts_equals_the_reference() -> None:
    """A request that ran out of blocks is computed anew."""
    model = tiny("M*")
    engine = make_engine(model, "optimized", OWN, kernels="torch", num_blocks=2)
    for index in range(2):
        engine.add(text(15, seed=index), SAMPLING)
    run = drain(engine)
    assert any(record.plan.preempted for record in run.records)
    for output in run.outputs.values():
        assert_equals_lone(model, output, run, SAMPLING)


# What is chosen, and what is refused.


def test_it_is_the_set_of_triton_but_for_mamba_layers() -> None:
    """And all four of its own are where they are said to be."""
    chosen = KERNELS["mamba-ssm"].items() - KERNELS["triton"].items()
    assert {key for key, _ in chosen} == {*OWN}
    assert {key.split(".")[0] for key in OWN} == {"conv1d", "scan"}
    parts = build_components("optimized", kernels="mamba-ssm")
    for key in OWN:
        name = key.split(".")[1]
        assert getattr(parts, name) is getattr(packages, name)
    assert packages.__name__ == PACKAGES


def test_graphs_hold_decode_steps_unless_told_otherwise() -> None:
    """On a GPU; nobody else's defaults are touched."""
    cuda = torch.device("cuda")
    for kernels, graphs in (("mamba-ssm", "decode"), ("triton", "all")):
        asked = EngineConfig(kernels=kernels)  # type: ignore[arg-type]
        assert settle(asked, BACKENDS[1], cuda).graphs == graphs
    asked = EngineConfig(kernels="mamba-ssm", graphs="off")
    assert settle(asked, BACKENDS[1], cuda).graphs == "off"


@pytest.mark.parametrize("components", [{}, {"scan.scan_prefill": None}])
def test_prompts_at_padded_shapes_are_refused(components: dict[str, Any]) -> None:
    """By the set, and by one component alone."""
    kernels = "torch" if components else "mamba-ssm"
    chosen = {key: OWN[key] for key in components}
    with pytest.raises(ConfigError, match='scan_prefill .*row at a.*"decode" or "off"'):
        make_engine(tiny(), "optimized", chosen, kernels=kernels, graphs="padded")


def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with all kernels."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="kernels='mamba-ssm' needs a GPU"):
        make_engine(tiny(), "optimized", kernels="mamba-ssm")


ODD_CHANNELS = {"head_dim": 3, "state_size": 8}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"time_step_limit": (0.1, math.inf)}, {}, "time_step_limit is .* clamp nothing"),
    ({"time_step_limit": (0.0, 0.9)}, {}, "time_step_limit is .* clamp nothing"),
    ({"conv_width": 5}, {}, "conv_width is 5; there are"),
    (ODD_CHANNELS, {}, "44 channels are convolved, not a multiple of 8"),
    ({}, {"ssm_state_dtype": "float64"}, "ssm_state_dtype is float64"),
    ({}, {"kv_dtype": "bfloat16"}, "conv windows are .*bfloat16, .* must be .*float32"),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD)
def test_what_the_packages_lack_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """When the engine is built, and by name."""
    model = tiny(mamba=replace(MAMBA, **changes))
    with pytest.raises(ConfigError, match=f"mamba-ssm.* cannot be used: {message}"):
        make_engine(model, "optimized", OWN, **options)


def test_float64_is_refused() -> None:
    """It would be rounded on the way."""
    with pytest.raises(ConfigError, match="used: dtype is float64"):
        make_engine(tiny(dtype="float64"), "optimized", OWN)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens_per_step", 2**26, "max_tokens_per_step is 67108864, more than"),
        ("snapshot_slots", 2**26, "state slots, more than its offsets"),
    ],
)
def test_sizes_beyond_offsets_are_refused(field: str, value: int, message: str) -> None:
    """Nobody counts that far in 32 bits."""
    sizes = replace(SIZES, **{field: value})
    with pytest.raises(ConfigError, match=message):
        packages.check(MAMBA, sizes, F32, F32, F32)


@pytest.mark.parametrize(
    ("chunk", "tokens", "is_refused"),
    [
        (16, 2**16, True),
        (16, 2**16 - 1, False),
        (32, 2**17, True),
        (32, 2**17 - 1, False),
        (128, 2**17, False),
    ],
)
def test_states_of_short_chunks_are_counted(
    chunk: int, tokens: int, is_refused: bool
) -> None:
    """Each chunk has a state of its own, far larger than what its tokens hold."""
    nano3 = MambaConfig(num_heads=64, head_dim=64, state_size=128, num_groups=8)
    sizes = replace(SIZES, scan_chunk_size=chunk, max_tokens_per_step=tokens)
    listed = packages._list_refused(nano3, sizes, F32, F32, F32)
    refused = [reason for is_wrong, reason in listed if is_wrong]
    assert len(refused) == is_refused
    assert all(f"in scan chunks of {chunk}" in reason for reason in refused)


def test_the_published_shape_is_not_refused() -> None:
    """Nor any dtype that a model has."""
    nano3 = MambaConfig(num_heads=64, head_dim=64, state_size=128, num_groups=8)
    for dtype in (F32, BF16, torch.float16):
        packages.check(nano3, SIZES, dtype, dtype, F32)


def test_a_model_without_mamba_layers_needs_no_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of them is called."""
    monkeypatch.setattr(packages, "_operators", None)
    engine = make_engine(tiny("*-"), "optimized", OWN)
    engine.add(text(9), SAMPLING)
    assert len(drain(engine).outputs) == 1


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Import the packages anew, and forget what came of it."""
    packages._operators.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    packages._operators.cache_clear()


@pytest.mark.parametrize("name", ["causal_conv1d", "mamba_ssm", "einops"])
def test_a_missing_package_is_one_error(
    name: str, forgotten: pytest.MonkeyPatch
) -> None:
    """It says what to install, and what else to do."""
    if name == "mamba_ssm":
        forgotten.setattr(packages, "find_spec", lambda _: None)
    else:
        forgotten.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    pattern = f"pip install mamba-ssm causal-conv1d.*triton.*{name}"
    with pytest.raises(ConfigError, match=pattern):
        make_engine(tiny(), "optimized", OWN)


def test_a_package_of_another_version_is_one_error(
    forgotten: pytest.MonkeyPatch,
) -> None:
    """Without the function that is called."""
    forgotten.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    with pytest.raises(ConfigError, match="no attribute 'causal_conv1d_fn'"):
        make_engine(tiny(), "optimized", OWN)


def test_importing_leaves_no_trace(forgotten: pytest.MonkeyPatch) -> None:
    """Whoever imports the whole package gets it, or their own error; once is enough."""
    forgotten.setitem(sys.modules, "mamba_ssm", found := ModuleType("mamba_ssm"))
    before = {name for name in sys.modules if name.startswith("mamba_ssm")}
    operators = packages._operators()
    assert sys.modules["mamba_ssm"] is found
    assert {name for name in sys.modules if name.startswith("mamba_ssm")} == before
    assert packages._operators() is operators


def test_products_are_of_float32_while_kernels_are_compiled() -> None:
    """And of whatever others want before and after."""
    knobs: Any = importlib.import_module("triton.knobs").language
    seen: list[str | None] = [knobs.fp32_default]
    with packages._products_of_float32():
        seen.append(knobs.fp32_default)
    seen.append(knobs.fp32_default)
    assert seen == [seen[0], "tf32x3", seen[0]]
