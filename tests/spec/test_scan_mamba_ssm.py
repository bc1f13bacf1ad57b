"""The selective scan against the torch functions of the package ``mamba_ssm``.

They run in float64 on the very operands of the side under test, so what is measured is
the error of that side. ``ssd_chunk_scan_combined_ref`` takes whole chunks, starts from
an empty state, clamps no time step and keeps the last state to itself; the functions
that it is made of take and give what it does not.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import ScanTokens
from lockstep.config import MambaConfig
from lockstep.parameters import MambaParameters
from tests.factories import (
    MAMBA,
    Row,
    dummies,
    load,
    make_batch,
    model_config,
    plan_sizes,
    randn,
    random_parameters,
    scan_tokens,
    take,
)
from tests.tolerances import assert_budgeted

MODULE = "scan"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux",
    reason="triton, which mamba_ssm imports, is built for Linux",
)

SIZES = plan_sizes(model_config("mamba"))
CHUNK = SIZES.scan_chunk_size
SLOT = 1
CONFIGS = {
    "3 of 1": replace(MAMBA, num_heads=3, num_groups=1),
    "10 of 2": replace(MAMBA, num_heads=10, num_groups=2),
}
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
LIMITS = (MAMBA.time_step_limit, (0.3, 1.1))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

heads_and_groups = pytest.mark.parametrize(
    "config", CONFIGS.values(), ids=CONFIGS.keys()
)
lengths = pytest.mark.parametrize("length", LENGTHS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
limits = pytest.mark.parametrize("limit", LIMITS)


class Package(NamedTuple):
    """The modules of ``mamba_ssm`` that hold the functions."""

    combined: ModuleType
    update: ModuleType


@pytest.fixture(scope="module")
def package() -> Package:
    """Import ``mamba_ssm`` without its compiled half, and hide it again.

    Models of `transformers` that are imported later would find it, and call kernels
    where the tests want their torch functions.
    """
    compiled = "selective_scan_cuda"
    sys.modules.setdefault(compiled, ModuleType(compiled))
    try:
        return Package(
            importlib.import_module("mamba_ssm.ops.triton.ssd_combined"),
            importlib.import_module("mamba_ssm.ops.triton.selective_state_update"),
        )
    except ImportError as error:
        pytest.fail(
            f"mamba_ssm cannot be imported ({error}); it is part of the test "
            "environment: run `make setup`"
        )
    finally:
        for name in list(sys.modules):
            if name.partition(".")[0] in ("mamba_ssm", compiled):
                del sys.modules[name]


def draw(
    config: MambaConfig, count: int, dtype: torch.dtype
) -> tuple[ScanTokens, MambaParameters]:
    """Draw tokens and a layer; time steps fit float32, to which the package goes."""
    model = replace(model_config("mamba"), mamba=config)
    layer = random_parameters(model, dtype=dtype).layers[0]
    assert isinstance(layer, MambaParameters)
    tokens = scan_tokens(config, count, dtype=dtype)
    return tokens._replace(dt=tokens.dt.float().to(dtype)), layer


def pool(config: MambaConfig, dtype: torch.dtype) -> Tensor:
    """Make a pool of random states, wide enough for the arithmetic."""
    shape = (SIZES.num_slots, config.num_heads, config.head_dim, config.state_size)
    return randn(*shape, seed=7, dtype=torch.promote_types(dtype, torch.float32))


def settle(tokens: ScanTokens, layer: MambaParameters, config: MambaConfig) -> Tensor:
    """Return the time steps as they are used, in float64."""
    dt = tokens.dt.double() + layer.dt_bias.double()
    return functional.softplus(dt).clamp(*config.time_step_limit)


def extend(part: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Widen, append tokens of one value, and make a batch of it."""
    tail = torch.full((count, *part.shape[1:]), value, dtype=torch.float64)
    return torch.cat((part.double(), tail))[None]


def combined_scan(
    package: Package, tokens: ScanTokens, layer: MambaParameters
) -> tuple[Tensor, Tensor]:
    """Return y and the last state from ``ssd_chunk_scan_combined_ref`` alone.

    The state is read out by tokens at the end, one for each of its columns: they take
    nothing in, let nothing decay, and their C is one there and zero elsewhere.
    """
    length, _, columns = tokens.B.shape
    more = columns + -(length + columns) % CHUNK
    x, B, C = (extend(part, more) for part in (tokens.x, tokens.B, tokens.C))
    C[0, length : length + columns] = torch.eye(columns, dtype=C.dtype)[:, None]
    y = package.combined.ssd_chunk_scan_combined_ref(
        x,
        extend(tokens.dt, more, -torch.inf),
        layer.A.double(),
        B,
        C,
        CHUNK,
        D=layer.D.double(),
        dt_bias=layer.dt_bias.double(),
        dt_softplus=True,
    )[0]
    return y[:length], y[length : length + columns].permute(1, 2, 0)


def resumed_scan(
    package: Package,
    tokens: ScanTokens,
    layer: MambaParameters,
    config: MambaConfig,
    initial: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return y and the last state from the parts of ``ssd_chunk_scan_combined_ref``."""
    more = -len(tokens.x) % CHUNK
    x, B, C = (extend(part, more) for part in (tokens.x, tokens.B, tokens.C))
    dt = extend(settle(tokens, layer, config), more).mT.unflatten(2, (-1, CHUNK))
    decay = (dt * layer.A.double()[:, None, None]).cumsum(
        -1
    )  # (1, heads, chunks, size)
    arising = package.combined.chunk_state_ref(B, x, dt, decay)
    states, last = package.combined.state_passing_ref(
        arising.flatten(3), decay[..., -1], initial.double().flatten(1)[None]
    )
    y = package.combined.chunk_scan_ref(
        B, C, x, dt, decay, states.view_as(arising), D=layer.D.double()
    )
    return y[0, : len(tokens.x)], last[0].view_as(initial)


@dtypes
@lengths
@heads_and_groups
def test_prefill_equals_the_combined_scan(
    side: str, package: Package, config: MambaConfig, length: int, dtype: torch.dtype
) -> None:
    """A whole sequence gives the outputs and the last state of the package."""
    tokens, layer = draw(config, length, dtype)
    states = pool(config, dtype)
    states[SIZES.zero_slot] = 0
    batch = make_batch(SIZES, [], [Row(0, dummies(length), SLOT, SIZES.zero_slot)])
    y = load(side, "scan").scan_prefill(tokens, layer, config, states, batch)
    exact_y, exact_state = combined_scan(package, tokens, layer)
    assert_budgeted("scan", y, exact_y)
    assert_budgeted("scan_state", states[SLOT], exact_state)


@dtypes
@heads_and_groups
@pytest.mark.parametrize("cuts", [(0, 1), (5, CHUNK), (CHUNK, CHUNK + 1), (3, 30)])
def test_pieces_and_decode_steps_equal_the_combined_scan(
    side: str,
    package: Package,
    config: MambaConfig,
    cuts: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Two slices and then token after token give what the package gives at once."""
    length = 2 * CHUNK + 3
    tokens, layer = draw(config, length, dtype)
    states, scan = pool(config, dtype), load(side, "scan")
    states[SLOT] = 0
    outputs: list[Tensor] = []
    for start, end in zip((0, *cuts), cuts, strict=False):
        batch = make_batch(SIZES, [], [Row(start, dummies(end - start), SLOT)])
        piece = take(tokens, start, end)
        outputs.append(scan.scan_prefill(piece, layer, config, states, batch))
    for place in range(cuts[-1], length):
        batch = make_batch(SIZES, [Row(place, [0], SLOT)])
        piece = take(tokens, place, place + 1)
        outputs.append(scan.scan_decode(piece, layer, config, states, batch))
    exact_y, exact_state = combined_scan(package, tokens, layer)
    assert_budgeted("scan", torch.cat(outputs), exact_y)
    assert_budgeted("scan_state", states[SLOT], exact_state)


@limits
@dtypes
@lengths
@heads_and_groups
def test_prefill_from_a_state_equals_the_parts(
    side: str,
    package: Package,
    config: MambaConfig,
    length: int,
    dtype: torch.dtype,
    limit: tuple[float, float],
) -> None:
    """A slice that goes on from any state, in the middle of a chunk, does likewise."""
    config = replace(config, time_step_limit=limit)
    tokens, layer = draw(config, length, dtype)
    states = pool(config, dtype)
    initial = states[SLOT].clone()
    batch = make_batch(SIZES, [], [Row(5, dummies(length), SLOT)])
    y = load(side, "scan").scan_prefill(tokens, layer, config, states, batch)
    exact_y, exact_state = resumed_scan(package, tokens, layer, config, initial)
    assert_budgeted("slow_scan", y, exact_y)
    assert_budgeted("slow_scan_state", states[SLOT], exact_state)


@limits
@dtypes
@heads_and_groups
def test_decode_equals_the_state_update(
    side: str,
    package: Package,
    config: MambaConfig,
    dtype: torch.dtype,
    limit: tuple[float, float],
) -> None:
    """One step of three rows equals ``selective_state_update_ref``."""
    config = replace(config, time_step_limit=limit)
    tokens, layer = draw(config, 3, dtype)
    states, slots = pool(config, dtype), [2, 0, SLOT]
    theirs = states[slots].double()
    dt = settle(tokens, layer, config)
    expected = package.update.selective_state_update_ref(
        theirs,
        tokens.x.double(),
        dt[..., None].expand(tokens.x.shape),
        layer.A.double()[:, None, None].expand(theirs.shape[1:]),
        tokens.B.double(),
        tokens.C.double(),
        D=layer.D.double()[:, None].expand(tokens.x.shape[1:]),
    )
    batch = make_batch(SIZES, [Row(9, [0], slot) for slot in slots])
    y = load(side, "scan").scan_decode(tokens, layer, config, states, batch)
    assert_budgeted("scan", y, expected)
    assert_budgeted("scan_state", states[slots], theirs)
