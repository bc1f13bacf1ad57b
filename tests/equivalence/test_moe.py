"""Experts in tiles against token by token: the same choices, the same sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.config import Activation, MoeConfig
from tests.factories import LATENT_MOE, MOE, SOFTMAX_MOE, load, randn
from tests.host_reads import no_host_reads
from tests.tolerances import assert_budgeted, assert_equal

HIDDEN = 19
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
#: From no token to many tiles an expert, on both sides of every change of height.
TOKENS = (0, 1, 2, 3, 4, 5, 7, 15, 16, 17, 33, 64, 97, 200)
CONFIGS = {
    "plain": MOE,
    "groups": LATENT_MOE,
    "softmax": SOFTMAX_MOE,
    "one expert": replace(MOE, num_experts=1, top_k=1),
    "all experts": replace(MOE, num_experts=7, top_k=7),
    "one of many": replace(MOE, num_experts=33, top_k=1),
    "many of many": replace(MOE, num_experts=48, top_k=11, gated=True),
}


def route(
    side: str, hidden: Tensor, config: MoeConfig, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route tokens with parameters drawn for the model."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    mask = torch.ones(len(hidden), dtype=torch.bool) if mask is None else mask
    router = randn(config.num_experts, HIDDEN, seed=1) / HIDDEN**0.5
    correction = randn(config.num_experts, seed=2).to(wide) / 4
    if config.scoring == "softmax":
        correction = None
    moe = load(side, "moe")
    return moe.route(hidden, router.to(wide), correction, config, mask)


def matrices(config: MoeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw the matrices of all experts, in the width that they work in."""
    width = config.latent_size or HIDDEN
    num_rows = config.expert_size * (2 if config.gated else 1)
    up = randn(config.num_experts, num_rows, width, seed=3) / width**0.5
    down = randn(config.num_experts, width, config.expert_size, seed=4)
    return up.to(dtype), (down / config.expert_size**0.5).to(dtype)


def apply(
    side: str, hidden: Tensor, ids: Tensor, weights: Tensor, config: MoeConfig
) -> Tensor:
    """Send tokens through experts."""
    parameters = matrices(config, hidden.dtype)
    return load(side, "moe").apply_experts(hidden, ids, weights, *parameters, config)


def compare(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: MoeConfig,
    budget: str = "experts",
) -> None:
    """Hold what experts add up to to the budget of its dtype, against float64."""
    actual = apply("optimized", hidden, ids, weights, config)
    up, down = (matrix.double() for matrix in matrices(config, hidden.dtype))
    moe = load("reference", "moe")
    exact = moe.apply_experts(hidden.double(), ids, weights.double(), up, down, config)
    assert actual.dtype == hidden.dtype
    assert_budgeted(budget, actual, exact)


def inputs(count: int, config: MoeConfig, dtype: torch.dtype) -> Tensor:
    """Draw what the experts take in."""
    return randn(count, config.latent_size or HIDDEN, seed=5, dtype=dtype)


@pytest.mark.parametrize("count", TOKENS)
@pytest.mark.parametrize("name", CONFIGS)
def test_edge_sizes(name: str, count: int) -> None:
    """The same experts; weights and sums within their budgets."""
    config, hidden = CONFIGS[name], randn(count, HIDDEN)
    ids, weights = route("optimized", hidden, config)
    expected_ids, expected_weights = route("reference", hidden, config)
    assert_equal(ids, expected_ids)
    assert_budgeted("route", weights, expected_weights)
    compare(inputs(count, config, torch.float32), ids, weights, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations(activation: Activation, gated: bool, dtype: torch.dtype) -> None:
    """Every inner function, in every dtype."""
    config = replace(LATENT_MOE, activation=activation, gated=gated)
    hidden = randn(29, HIDDEN, dtype=dtype)
    ids, weights = route("optimized", hidden, config)
    assert_equal(ids, route("reference", hidden, config)[0])
    compare(inputs(29, config, dtype), ids, weights, config)


#: Experts of seven that each token visits.
LOADS: dict[str, list[list[int]]] = {
    "all to the first": [[0, -1, -1]] * 24,
    "all to the last": [[6, -1, -1]] * 24,
    "all to the same three": [[1, 3, 5]] * 24,
    "one expert has none": [[0, 1, 2], [3, 4, 6]] * 12,
    "one has one": [[0, 1, -1]] * 23 + [[3, -1, -1]],
    "nobody visits any": [[-1, -1, -1]] * 24,
    "tiles full to the brim": [[0, 2, 4]] * 8 + [[1, 2, 5]] * 16,
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loads(name: str, dtype: torch.dtype) -> None:
    """However unevenly experts are visited, each pair has a place of its own."""
    config = replace(MOE, num_experts=7, top_k=3)
    ids = torch.tensor(LOADS[name])
    weights = randn(24, 3, seed=6, dtype=torch.promote_types(dtype, torch.float32))
    compare(inputs(24, config, dtype), ids, weights, config)


@given(data=st.data(), num_experts=st.integers(1, 9), count=st.integers(0, 30))
def test_any_load(data: st.DataObject, num_experts: int, count: int) -> None:
    """Any experts of any tokens, none for some."""
    top_k = data.draw(st.integers(1, num_experts))
    chosen = st.sets(st.integers(0, num_experts - 1), max_size=top_k).map(sorted)
    rows = data.draw(st.lists(chosen, min_size=count, max_size=count))
    filled = [[*row, *[-1] * (top_k - len(row))] for row in rows]
    ids = torch.tensor(filled, dtype=torch.int64).view(count, top_k)
    config = replace(MOE, num_experts=num_experts, top_k=top_k)
    weights = randn(count, top_k, seed=count)
    hidden = inputs(count, config, torch.float32)
    # One token's sum may be small for what it is made of.
    compare(hidden, ids, weights, config, "few_experts")


@pytest.mark.parametrize("limit", [1, 200, 2000])
@pytest.mark.parametrize("count", [3, 50])
def test_tiles_in_parts(
    monkeypatch: pytest.MonkeyPatch, count: int, limit: int
) -> None:
    """Where memory bounds the tiles at once, the sums stay the same."""
    ids, weights = route("optimized", randn(count, HIDDEN), MOE)
    monkeypatch.setattr(load("optimized", "moe"), "_MAX_GATHERED", limit)
    compare(inputs(count, MOE, torch.float32), ids, weights, MOE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -1e38])
def test_padding_harms_nobody(name: str, dtype: torch.dtype, garbage: float) -> None:
    """Garbage in padded tokens gets no expert, stays out of all others, ends as 0."""
    config = CONFIGS[name]
    mask = torch.arange(23) % 3 < 2
    hidden, wide = randn(23, HIDDEN, dtype=dtype), inputs(23, config, dtype)
    clean = route("optimized", hidden, config, mask)
    expected = apply("optimized", wide, *clean, config)
    hidden[~mask] = wide[~mask] = garbage
    ids, weights = route("optimized", hidden, config, mask)
    assert_equal(ids, clean[0])
    assert_equal(weights, clean[1])
    assert_equal(ids[~mask], torch.full_like(ids[~mask], -1))
    assert_equal(weights[~mask], torch.zeros_like(weights[~mask]))
    weights[~mask] = garbage
    outputs = apply("optimized", wide, ids, weights, config)
    assert_equal(outputs, expected)
    assert_equal(outputs[~mask], torch.zeros_like(outputs[~mask]))


def test_wrong_experts_harm_no_other_token() -> None:
    """A token whose own numbers went wrong leaves its neighbours in a tile alone."""
    config = replace(MOE, num_experts=2, top_k=2)
    hidden = randn(9, HIDDEN)
    ids, weights = route("optimized", hidden, config)
    expected = apply("optimized", hidden, ids, weights, config)
    hidden[4] = torch.nan
    outputs = apply("optimized", hidden, ids, weights, config)
    assert outputs[4].isnan().all()
    others = torch.arange(9) != 4
    assert_equal(outputs[others], expected[others])


@pytest.mark.parametrize("name", ["plain", "groups", "many of many"])
def test_ties(name: str) -> None:
    """Equal scores of experts and groups are broken by the lowest id for all tokens."""
    config, source = CONFIGS[name], torch.Generator().manual_seed(8)
    levels = torch.randint(0, 3, (40, config.num_experts), generator=source) / 2.0
    router, mask = torch.zeros(config.num_experts, HIDDEN), torch.tensor([True])
    for correction in levels:
        arguments: tuple[Any, ...] = (randn(1, HIDDEN), router, correction, config)
        ids, weights = load("optimized", "moe").route(*arguments, mask)
        expected_ids, expected_weights = load("reference", "moe").route(
            *arguments, mask
        )
        assert_equal(ids, expected_ids)
        assert_budgeted("route", weights, expected_weights)


@pytest.mark.parametrize(
    ("num_pairs", "num_experts"), [(1, 1), (5, 9), (48, 3), (99, 3)]
)
def test_every_pair_has_one_row_of_its_expert(num_pairs: int, num_experts: int) -> None:
    """Tiles hold each pair once, in the tile of its expert, and never too many."""
    tiles_of = load("optimized", "moe")._Tiles
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, num_experts, (num_pairs, 1), generator=source)
        tiles = tiles_of(ids, num_experts)
        height = tiles.tokens.shape[1]
        places = tiles.places.flatten()
        assert len(places.unique()) == num_pairs
        assert_equal(tiles.experts[places // height], ids.flatten())
        assert_equal(tiles.tokens.flatten()[places], torch.arange(num_pairs))
        assert tiles.tokens.numel() <= max(2, height) * num_pairs


@pytest.mark.parametrize("count", [1, 50])
def test_nothing_is_read_back(count: int) -> None:
    """The host never waits for a number from the device."""
    hidden = randn(count, HIDDEN)
    with no_host_reads():
        for config in (MOE, replace(LATENT_MOE, latent_size=None), SOFTMAX_MOE):
            ids, weights = route("optimized", hidden, config)
            apply("optimized", hidden, ids, weights, config)
