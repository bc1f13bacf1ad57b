"""Kernels of attention, experts and draws on a GPU, at the sizes of a real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.batch import Draws
from lockstep.config import MoeConfig, RotaryConfig
from tests.factories import load
from tests.kernels.tiers import load_kernels
from tests.tolerances import assert_budgeted, assert_equal

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16)
#: Query heads, K/V heads and width of a head.
HEADS = [(32, 2, 128), (32, 8, 128), (9, 3, 80), (8, 2, 256)]
BLOCK = 256
#: Positions whose angles are within what the budget of rotary is for.
NEAR = 65


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers on the device."""
    source = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=source, device=CUDA).to(dtype)


def ints(*values: int) -> Tensor:
    """Make whole numbers on the device."""
    return torch.tensor(values, dtype=torch.int64, device=CUDA)


def twice(call: Callable[[], Tensor]) -> Tensor:
    """Return what a call computes, after it computed the same bits before."""
    first = call().clone()
    assert_equal(call(), first)
    return first


class Rows:
    """Rows with contexts of some lengths, in blocks of a pool that is NaN elsewhere."""

    def __init__(
        self, contexts: list[int], heads: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        """Fill the pool."""
        self.contexts, self.scale = contexts, heads[2] ** -0.5
        width = max(-(-context // BLOCK) for context in contexts) + 2
        num_blocks = len(contexts) * width
        source = torch.Generator(CUDA).manual_seed(1)
        order = torch.randperm(num_blocks, generator=source, device=CUDA)
        self.tables = order.view(len(contexts), width)
        shape = num_blocks + 1, BLOCK, *heads[1:]
        self.pools = torch.full((2, *shape), torch.nan, dtype=dtype, device=CUDA)
        for row, context in enumerate(contexts):
            positions = torch.arange(context, device=CUDA)
            blocks = self.tables[row][positions // BLOCK]
            drawn = randn(2, context, *heads[1:], seed=10 + row, dtype=dtype)
            self.pools[:, blocks, positions % BLOCK] = drawn

    def exact(self, row: int, queries: Tensor, starts: Tensor) -> Tensor:
        """Attend from some queries of a row, each to positions up to its own."""
        context, num_kv_heads = self.contexts[row], self.pools.shape[3]
        keys, values = self.pools[:, self.tables[row]].flatten(1, 2)[:, :context]
        grouped = queries.double().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("tkgd,nkd->kgtn", grouped, keys.double()) * self.scale
        is_hidden = torch.arange(context, device=CUDA) > starts[:, None]
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return torch.einsum("kgtn,nkd->tkgd", weights, values.double()).flatten(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "contexts", [[33000], [1, 0, 255, 256, 257, 5000, 64, 0], [700, 31] * 130]
)
def test_decode(
    contexts: list[int], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Contexts of any length, split or not; padded rows get zeros."""
    rows = Rows(contexts, heads, dtype)
    batch: Any = SimpleNamespace(
        block_tables=rows.tables, context_lens=ints(*contexts), num_decode_tokens=0
    )
    wide = randn(len(contexts), heads[0], heads[2] + 8, seed=2, dtype=dtype)
    queries = wide[..., 8:]
    kernel = load_kernels("optimized", "attention").attend_decode
    outputs = twice(lambda: kernel(queries, *rows.pools, rows.scale, batch))
    for row, context in enumerate(contexts):
        if not context:
            assert_equal(outputs[row], torch.zeros_like(outputs[row]))
            continue
        exact = rows.exact(row, queries[row : row + 1], ints(context - 1))
        assert_budgeted("long_attention", outputs[row : row + 1], exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Slices of any length over cached prefixes, padded rows, padding at the end."""
    pieces = [(0, 1), (5000, 7), (16, 300), (0, 0), (300, 900), (255, 2), (0, 0)]
    rows = Rows([start + length for start, length in pieces], heads, dtype)
    ends = torch.tensor([0, *(length for _, length in pieces)]).cumsum(0).to(CUDA)
    batch: Any = SimpleNamespace(
        block_tables=rows.tables,
        cu_prefill_lens=ends,
        prefill_starts=ints(*(start for start, _ in pieces)),
        num_decode_tokens=0,
    )
    num_tokens = int(ends[-1]) + 50
    queries = randn(num_tokens, *heads[::2], seed=3, dtype=dtype)
    queries[ends[-1] :] = torch.nan
    kernel = load_kernels("optimized", "attention").attend_prefill
    outputs = twice(lambda: kernel(queries, *rows.pools, rows.scale, batch))
    assert not outputs[ends[-1] :].any()
    for row, (start, length) in enumerate(pieces):
        mine = slice(int(ends[row]), int(ends[row + 1]))
        positions = torch.arange(start, start + length, device=CUDA)
        if length:
            exact = rows.exact(row, queries[mine], positions)
            assert_budgeted("long_attention", outputs[mine], exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_appending_leaves_all_else_as_it_is(dtype: torch.dtype) -> None:
    """Bytes of blocks in which no token has a place stay the same."""
    pools = randn(2, 40, BLOCK, 2, 128, seed=4, dtype=dtype)
    before = pools.clone()
    new = randn(2, 700, 2, 128, seed=5, dtype=dtype)
    source = torch.Generator(CUDA).manual_seed(6)
    index = torch.randperm(20 * BLOCK, generator=source, device=CUDA)[:700]
    load_kernels("optimized", "attention").append_kv(*new, *pools, index)
    load("optimized", "attention").append_kv(*new, *before, index)
    assert_equal(pools, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stride", "wide"), [(1, torch.float64), (873, None)])
def test_rotary(stride: int, wide: torch.dtype | None, dtype: torch.dtype) -> None:
    """Turned as far as float64 turns near positions, and as the twin does far ones.

    The angle of a far position is known no better than in float32. Values are stored as
    they are, and nothing else is written.
    """
    config = RotaryConfig(part=0.5)
    heads = [randn(300, n, 128, seed=n, dtype=dtype) for n in (32, 8, 8)]
    positions = torch.arange(300, device=CUDA) % (NEAR if stride == 1 else 300) * stride
    source = torch.Generator(CUDA).manual_seed(6)
    index = torch.randperm(2 * BLOCK, generator=source, device=CUDA)[:300]

    def append(load_side: Any, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        shape = (2, 3, BLOCK, 8, 128)
        pools = torch.full(shape, torch.nan, dtype=parts[0].dtype, device=CUDA)
        attention = load_side("optimized", "attention")
        turned = attention.append_rotary_kv(*parts, *pools, index, positions, config)
        places = pools.flatten(1, 2)
        written = places[:, index]
        places[:, index] = torch.nan
        assert places.isnan().all()
        return turned, written

    turned, written = append(load_kernels, heads)
    exact, stored = append(load, [each.to(wide or dtype) for each in heads])
    assert_budgeted("rotary", turned, exact)
    assert_budgeted("rotary", written[0], stored[0])
    assert_equal(written[1], heads[2])


def moe_config(**changes: Any) -> MoeConfig:
    """Describe experts of the size of a real model's."""
    return replace(MoeConfig(128, 6, expert_size=1856, shared_size=0), **changes)


def exact_weights(scores: Tensor, ids: Tensor, config: MoeConfig) -> Tensor:
    """Weigh the experts that were chosen, in float64."""
    chosen = scores.double().gather(1, ids)
    if config.scoring == "softmax":
        return config.scaling * chosen.softmax(1)
    weights = chosen.sigmoid()
    if config.normalize_weights:
        weights = weights / weights.sum(1, keepdim=True)
    return config.scaling * weights


def assert_routed(
    hidden: Tensor, given: tuple[Tensor, Tensor | None], config: MoeConfig, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Hold choices to the twin's, to the last tie, and weights to float64.

    Scores are a library's product, and the same ones.
    """
    routed = hidden, *given, config, mask
    ids, weights = load_kernels("optimized", "moe").route(*routed)
    twin_ids, _ = load("optimized", "moe").route(*routed)
    assert_equal(ids, twin_ids)
    scores = torch.nn.functional.linear(hidden.to(given[0].dtype), given[0])
    exact = exact_weights(scores[mask], ids[mask], config)
    assert_budgeted("route", weights[mask], exact)
    assert bool((ids[~mask] == -1).all()) and not weights[~mask].any()
    return ids, weights


def exact_experts(
    hidden: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, gated: bool
) -> Tensor:
    """Add up experts in float64, one expert after the other."""
    total = torch.zeros_like(hidden, dtype=torch.float64)
    for expert in range(len(up)):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        inner = hidden[tokens].double() @ up[expert].double().T
        if gated:
            gates, inner = inner.chunk(2, dim=1)
            inner = torch.nn.functional.silu(gates) * inner
        else:
            inner = inner.relu().square()
        result = inner @ down[expert].double().T
        total[tokens] += weights[tokens, choices].double()[:, None] * result
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [1, 5, 64, 300, 3000])
def test_experts(count: int, gated: bool, dtype: torch.dtype) -> None:
    """From one token to thousands, a few of which are padding."""
    rows = 2 * 1856 if gated else 1856
    up = randn(128, rows, 2688, seed=1, dtype=dtype).mul_(2688**-0.5)
    down = randn(128, 2688, 1856, seed=2, dtype=dtype).mul_(1856**-0.5)
    hidden, router = randn(count, 2688, seed=3, dtype=dtype), randn(128, 2688, seed=4)
    activation = "silu" if gated else "relu2"
    config = moe_config(gated=gated, activation=activation, scaling=2.5)
    mask = torch.arange(count, device=CUDA) % 5 < 4
    hidden[~mask] = torch.nan
    correction = randn(128, seed=5) / 4
    ids, weights = assert_routed(hidden, (router / 52, correction), config, mask)
    experts = load_kernels("optimized", "moe").apply_experts
    outputs = twice(lambda: experts(hidden, ids, weights, up, down, config))
    assert_equal(outputs[~mask], torch.zeros_like(outputs[~mask]))
    exact = exact_experts(hidden[mask], ids[mask], weights[mask], up, down, gated)
    assert_budgeted("large_experts", outputs[mask], exact)


@pytest.mark.parametrize("num_groups", [1, 8])
@pytest.mark.parametrize(
    ("scoring", "is_normalized"),
    [("sigmoid", True), ("sigmoid", False), ("softmax", True)],
)
def test_choices(scoring: Any, is_normalized: bool, num_groups: int) -> None:
    """Of all experts or within groups; scores are whole numbers, and often equal."""
    config = moe_config(
        num_groups=num_groups,
        top_k_groups=min(3, num_groups),
        scoring=scoring,
        normalize_weights=is_normalized,
    )
    hidden = randn(5000, 64, seed=7).round()
    router = randn(128, 64, seed=8).round()
    assert_routed(hidden, (router, None), config, hidden[:, 0] < 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu"])
def test_activations(activation: Any, dtype: torch.dtype) -> None:
    """All functions, gated or not."""
    inputs, kernels = (
        randn(300, 3712, seed=9, dtype=dtype),
        load_kernels("optimized", "mlp"),
    )
    for name in ("activate", "activate_gated"):
        actual = twice(lambda name=name: getattr(kernels, name)(inputs, activation))
        exact = getattr(load("optimized", "mlp"), name)(inputs.double(), activation)
        assert_budgeted("activate", actual, exact)


def draws(count: int, vocab_size: int) -> Draws:
    """Make draws of every kind: greedy, random, filtered by any of three."""
    rows = torch.arange(count, device=CUDA)
    real = rows.double()
    return Draws(
        temperatures=((rows % 4 > 0) * (0.3 + real / count)).float(),
        top_ks=torch.where(rows % 3 == 1, 1 + rows * 7 % vocab_size, 0),
        top_ps=torch.where(rows % 5 < 3, 1 - (real + 1) / (count + 2), 1.0),
        min_ps=torch.where(rows % 7 == 3, 0.02, 0.0).double(),
        seeds=rows * 7919 + 2**40,
        positions=rows * 31,
        banned_ids=torch.stack((rows % vocab_size, -torch.ones_like(rows)), 1),
    )


@pytest.mark.parametrize("vocab_size", [1, 61, 50257, 131072])
@pytest.mark.parametrize("step", [0.0, 0.125])
def test_draws(vocab_size: int, step: float) -> None:
    """The very tokens of the twin; coarse steps make many logits equal."""
    logits = randn(210, vocab_size, seed=11) * 3
    logits = (logits / step).round() * step if step else logits
    given = logits, draws(210, vocab_size)
    tokens = twice(lambda: load_kernels("optimized", "sampler").sample(*given))
    assert_equal(tokens, load("optimized", "sampler").sample(*given))


def test_many_draws() -> None:
    """Noise is the twin's, bit for bit, in millions of numbers."""
    logits = torch.zeros(500, 131072, device=CUDA)
    given = (
        logits,
        draws(500, 131072)._replace(
            temperatures=torch.ones(500, device=CUDA),
            top_ks=torch.zeros(500, dtype=torch.int64, device=CUDA),
            top_ps=torch.ones(500, dtype=torch.float64, device=CUDA),
        ),
    )
    tokens = load_kernels("optimized", "sampler").sample(*given)
    assert_equal(tokens, load("optimized", "sampler").sample(*given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities(dtype: torch.dtype) -> None:
    """Of a whole vocabulary, some of it forbidden."""
    logits = (randn(70, 131072, seed=12) * 5).to(dtype)
    logits[:, 4096:8192] = -torch.inf
    kernel = load_kernels("optimized", "sampler").log_probabilities
    actual = twice(lambda: kernel(logits))
    exact = torch.log_softmax(logits.double(), 1)
    is_finite = exact.isfinite()
    assert_equal(actual.isfinite(), is_finite)
    assert_budgeted("log_probabilities", actual[is_finite], exact[is_finite])
