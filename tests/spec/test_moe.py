"""Experts: who is chosen, with what weight, and what they add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GraniteMoeHybridConfig, NemotronHConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridTopKRouter,
)
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHExperts,
    NemotronHTopkRouter,
)

from lockstep.config import Activation, MoeConfig
from tests import oracles
from tests.factories import LATENT_MOE, MOE, SOFTMAX_MOE, at_alignment, load, randn
from tests.tolerances import assert_budgeted, assert_consistent, assert_equal

HIDDEN = 19
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CONFIGS = {
    "plain": MOE,
    "groups": LATENT_MOE,
    "all": replace(MOE, top_k=6),
    "one": replace(MOE, top_k=1, normalize_weights=False, scaling=0.5),
    "softmax": replace(SOFTMAX_MOE, scaling=1.5),
}
#: Those of the published router with a correction.
SIGMOID = [name for name in CONFIGS if name != "softmax"]


def router_parameters(
    config: MoeConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Draw a router and, where there is one, a correction."""
    router = randn(config.num_experts, HIDDEN, seed=1) / HIDDEN**0.5
    if config.scoring == "softmax":
        return router.to(dtype), None
    return router.to(dtype), randn(config.num_experts, seed=2).to(dtype) / 4


def route(
    side: str, hidden: Tensor, config: MoeConfig, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route all tokens, or those of a mask."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    mask = torch.ones(len(hidden), dtype=torch.bool) if mask is None else mask
    parameters = router_parameters(config, wide)
    return load(side, "moe").route(hidden, *parameters, config, mask)


def expert_parameters(
    config: MoeConfig, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Draw the matrices of all experts."""
    shape = (config.num_experts, config.expert_size, width)
    rows = config.expert_size * (2 if config.gated else 1)
    up = randn(config.num_experts, rows, width, seed=3) / width**0.5
    down = randn(*shape, seed=4).transpose(1, 2) / config.expert_size**0.5
    return up.to(dtype), down.contiguous().to(dtype)


def published_config(config: MoeConfig) -> NemotronHConfig:
    """Say the same in the published model's words."""
    published = NemotronHConfig(
        hidden_size=HIDDEN,
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
        moe_intermediate_size=config.expert_size,
        moe_latent_size=config.latent_size,
        mlp_hidden_act=config.activation,
        routed_scaling_factor=config.scaling,
        n_group=config.num_groups,
        topk_group=config.top_k_groups,
        norm_topk_prob=config.normalize_weights,
    )
    published._experts_implementation = "eager"
    return published


def dense(ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Spread weights over all experts."""
    spread = torch.zeros(len(ids), num_experts + 1, dtype=weights.dtype)
    return spread.scatter_(1, ids % (num_experts + 1), weights)[:, :num_experts]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_route_equals_brute_force(side: str, name: str, dtype: torch.dtype) -> None:
    """Sorting (score, id) pairs gives the same choice, ascending, and its weights."""
    config, hidden = CONFIGS[name], randn(40, HIDDEN, dtype=dtype)
    ids, weights = route(side, hidden, config)
    expected = oracles.route(hidden, *router_parameters(config), config)
    assert ids.tolist() == [list(chosen) for chosen in expected]
    exact = [list(chosen.values()) for chosen in expected]
    assert_budgeted("route", weights, torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize("name", SIGMOID)
def test_route_equals_transformers(side: str, name: str) -> None:
    """The published router chooses the same."""
    config, hidden = CONFIGS[name], randn(40, HIDDEN)
    theirs = NemotronHTopkRouter(published_config(config))
    router, correction = router_parameters(config)
    theirs.weight.data = router
    assert correction is not None
    theirs.e_score_correction_bias.copy_(correction)
    _, their_weights, their_ids = theirs(hidden)
    ids, weights = route(side, hidden, config)
    actual = dense(ids, weights, config.num_experts)
    expected = dense(their_ids, their_weights.detach(), config.num_experts)
    assert_equal(actual > 0, expected > 0)
    assert_budgeted("route", actual, expected)


def test_softmax_route_equals_transformers(side: str) -> None:
    """The published router of the largest scores' softmax chooses the same."""
    config, hidden = SOFTMAX_MOE, randn(40, HIDDEN)
    theirs = GraniteMoeHybridTopKRouter(
        GraniteMoeHybridConfig(
            hidden_size=HIDDEN,
            mamba_n_heads=2,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.top_k,
        )
    )
    theirs.weight.data, _ = router_parameters(config)
    their_ids, their_weights, _ = theirs(hidden)
    ids, weights = route(side, hidden, config)
    actual = dense(ids, weights, config.num_experts)
    expected = dense(their_ids, their_weights.detach(), config.num_experts)
    assert_equal(actual > 0, expected > 0)
    assert_budgeted("route", actual, expected)


@given(data=st.data(), name=st.sampled_from(sorted(CONFIGS)))
def test_ties_go_to_the_lowest_id(side: str, data: st.DataObject, name: str) -> None:
    """Equal scores, of experts or of groups, are broken by id."""
    config = CONFIGS[name]
    levels = st.lists(
        st.sampled_from([0.0, 0.25, 0.5]),
        min_size=config.num_experts,
        max_size=config.num_experts,
    )
    correction = torch.tensor(data.draw(levels))
    if config.scoring == "softmax":
        correction = None
    # A router of zeros scores every expert one half: exact sums, many ties.
    hidden, router = randn(1, HIDDEN), torch.zeros(config.num_experts, HIDDEN)
    mask = torch.ones(1, dtype=torch.bool)
    ids, _ = load(side, "moe").route(hidden, router, correction, config, mask)
    expected = oracles.route(hidden, router, correction, config)
    assert ids.tolist() == [list(expected[0])]


def test_many_ties(side: str) -> None:
    """The rule holds where sorting algorithms change: among hundreds of experts."""
    config = replace(MOE, num_experts=320, top_k=8)
    router, correction = torch.zeros(320, HIDDEN), torch.zeros(320)
    correction[100::3] = 1.0
    hidden, mask = randn(3, HIDDEN), torch.ones(3, dtype=torch.bool)
    ids, _ = load(side, "moe").route(hidden, router, correction, config, mask)
    assert_equal(ids, torch.arange(100, 124, 3).expand(3, -1))


def test_padding_visits_no_expert(side: str) -> None:
    """Masked tokens get -1 and weight zero, and change nobody else."""
    hidden = randn(5, HIDDEN)
    mask = torch.tensor([True, False, True, True, False])
    hidden[~mask] = torch.nan
    ids, weights = route(side, hidden, MOE, mask)
    alone_ids, alone_weights = route(side, hidden[mask], MOE)
    assert_equal(ids[mask], alone_ids)
    assert_consistent(side, "route", weights[mask], alone_weights)
    assert_equal(ids[~mask], torch.full_like(ids[~mask], -1))
    assert_equal(weights[~mask], torch.zeros_like(weights[~mask]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu"])
def test_experts_equal_the_dense_sum(
    side: str, activation: Activation, gated: bool, dtype: torch.dtype
) -> None:
    """Visiting chosen experts gives what weighing all of them gives."""
    hidden = randn(12, HIDDEN, dtype=dtype)
    config = replace(MOE, activation=activation, gated=gated)
    ids, weights = route(side, hidden, config)
    matrices = expert_parameters(config, HIDDEN, dtype)
    apply = load(side, "moe").apply_experts
    actual = apply(hidden, ids, weights, *matrices, config)
    exact = oracles.apply_experts(
        hidden, dense(ids, weights, MOE.num_experts), *matrices, config
    )
    assert_budgeted("experts", actual, exact)


@pytest.mark.parametrize("config", [MOE, LATENT_MOE])
def test_experts_equal_transformers(side: str, config: MoeConfig) -> None:
    """The published experts give the same, in the model's width or a latent one."""
    width = config.latent_size or HIDDEN
    hidden, (up, down) = randn(12, width), expert_parameters(config, width)
    ids, weights = route(side, randn(12, HIDDEN, seed=6), config)
    theirs = NemotronHExperts(published_config(config))
    theirs.up_proj.data, theirs.down_proj.data = up, down
    apply = load(side, "moe").apply_experts
    actual = apply(hidden, ids, weights, up, down, config)
    assert_budgeted("experts", actual, theirs(hidden, ids, weights).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_rounded_once(side: str, dtype: torch.dtype) -> None:
    """Experts are weighed and added in ascending id, in the dtype of the weights."""
    config, hidden = replace(MOE, top_k=4), randn(30, HIDDEN, dtype=dtype)
    ids, weights = route(side, hidden, config)
    # Of each expert one column is left, which one feature, a one, lets through.
    up, down = (torch.zeros_like(m) for m in expert_parameters(MOE, HIDDEN, dtype))
    up[:, 0, 0], down[:, :, 0] = 1, randn(MOE.num_experts, HIDDEN, dtype=dtype)
    hidden[:, 0] = 1
    total = torch.zeros(30, HIDDEN, dtype=weights.dtype)
    for choice in range(4):
        result = down[ids[:, choice], :, 0]
        total += weights[:, choice, None] * result.to(total.dtype)
    apply = load(side, "moe").apply_experts
    assert_equal(apply(hidden, ids, weights, up, down, config), total.to(dtype))


def test_no_expert_adds_nothing(side: str) -> None:
    """Tokens of id -1 get zeros, whatever they hold."""
    hidden = randn(4, HIDDEN)
    hidden[1] = torch.nan
    ids, weights = route(side, hidden, MOE, torch.tensor([True, False, True, False]))
    matrices = expert_parameters(MOE, HIDDEN)
    outputs = load(side, "moe").apply_experts(hidden, ids, weights, *matrices, MOE)
    assert_equal(outputs[1::2], torch.zeros(2, HIDDEN))
    assert outputs[::2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [MOE, LATENT_MOE, SOFTMAX_MOE])
def test_company_changes_nothing(
    side: str, config: MoeConfig, dtype: torch.dtype
) -> None:
    """A token gets the same experts and numbers alone and at any alignment."""
    apply, hidden = load(side, "moe").apply_experts, randn(17, HIDDEN, dtype=dtype)
    matrices = expert_parameters(config, HIDDEN, dtype)
    ids, weights = route(side, hidden, config)
    together = ids, weights, apply(hidden, ids, weights, *matrices, config)
    alone: list[tuple[Tensor, Tensor, Tensor]] = []
    for token in range(len(hidden)):
        row = at_alignment(hidden[token : token + 1], token)
        routed = route(side, row, config)
        alone.append((*routed, apply(row, *routed, *matrices, config)))
    one_by_one = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    assert_equal(together[0], one_by_one[0])
    assert_consistent(side, "route", together[1], one_by_one[1])
    assert_consistent(side, "experts", together[2], one_by_one[2])


def test_no_tokens(side: str) -> None:
    """A batch may be empty."""
    nothing = torch.zeros(0, HIDDEN)
    ids, weights = route(side, nothing, MOE)
    assert_equal(ids, torch.zeros(0, MOE.top_k, dtype=torch.int64))
    matrices = expert_parameters(MOE, HIDDEN)
    apply = load(side, "moe").apply_experts
    assert_equal(apply(nothing, ids, weights, *matrices, MOE), nothing)
