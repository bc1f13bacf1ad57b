"""Kernels of attention, experts and draws against the loop, as the torch tier is.

Without a GPU, Triton's interpreter runs them: a program takes about 9 ms, and bfloat16
is wrong there. So sizes are small, and all is float32.
"""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lockstep.batch import Draws
from lockstep.config import Activation
from lockstep.optimized.kernels import attention, moe, sampler
from tests.equivalence import test_attention, test_mlp, test_moe, test_sampler
from tests.factories import PART_ROTARY, ROTARY, make_draws, randn
from tests.kernels.tiers import use_kernels
from tests.plans import Padding, Slice, build_padded, make_sizes, make_step
from tests.tolerances import assert_budgeted, assert_equal

F32 = torch.float32
SIZES = make_sizes()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in all that is borrowed from the tests of the torch tier."""
    use_kernels(monkeypatch, test_attention, test_mlp, test_moe, test_sampler)
    # Programs whose split is empty return at once, but cost time here.
    monkeypatch.setattr(attention, "_MAX_SPLITS", 4)


@pytest.mark.parametrize(
    ("chunk", "blocks", "heads"), [(16, 1, (4, 2)), (16, 3, (9, 3)), (256, 1, (5, 1))]
)
def test_attending(chunk: int, blocks: int, heads: tuple[int, int]) -> None:
    """Ragged rows from any start, among padding, in blocks of any size."""
    sizes = make_sizes(chunk, blocks)
    decodes = [Slice(start, start + 1) for start in (0, 16, 90)]
    prefills = [Slice(0, 1), Slice(15, 55), Slice(90, 92), Slice(7, 80)]
    step = make_step(sizes, decodes, prefills)
    padded = build_padded(sizes, step, Padding(2, 1, 40, 3))
    test_attention.assert_twins(sizes, step, padded, heads)


@pytest.mark.parametrize("is_decode", [False, True])
def test_attending_from_rows_of_one_kind(is_decode: bool) -> None:
    """None of the other."""
    test_attention.test_rows_of_one_kind(2, is_decode)


@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_splits_do_not_show(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    """Contexts that leave splits empty, or fill the last in part."""
    monkeypatch.setattr(attention, "_MAX_SPLITS", num_splits)
    rows = [Slice(start, start + 1) for start in (0, 15, 16, 31, 47, 200)]
    test_attention.assert_twins(SIZES, make_step(SIZES, rows, []))


def test_shared_blocks_and_wrong_rows() -> None:
    """What exists is not written again; what goes wrong in a row stays in it."""
    test_attention.test_shared_blocks_stay_the_same(2)
    test_attention.test_a_row_of_nan_harms_no_other()


@pytest.mark.parametrize("config", [ROTARY, PART_ROTARY], ids=["whole", "part"])
@pytest.mark.parametrize(("count", "heads"), [(0, (4, 2)), (5, (9, 3))])
def test_turning(config: object, count: int, heads: tuple[int, int]) -> None:
    """Heads are turned in part, or whole, and appended in the same launch."""
    test_attention.test_turned_twins(config, count, heads, F32)


@pytest.mark.parametrize("model", [F32, torch.float16])
def test_turned_keys_are_rounded_twice(model: torch.dtype) -> None:
    """In pools of another dtype."""
    name = "test_turned_keys_are_rounded_as_the_model_then_as_the_pool"
    getattr(test_attention, name)(model)


def test_turning_leaves_inputs_alone() -> None:
    """Padding may hold anything."""
    test_attention.test_turning_of_padding_harms_no_other()


@pytest.mark.parametrize("function", test_mlp.FUNCTIONS)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations(function: str, activation: str) -> None:
    """Any number of tokens of any width; a token of NaN harms no other."""
    for count in (0, 3):
        test_mlp.test_twins(function, activation, count, 74, F32)
    test_mlp.test_tokens_of_nan_harm_no_other(function, activation)


@pytest.mark.parametrize("function", test_mlp.FUNCTIONS)
def test_views_are_activated(function: str) -> None:
    """Features may be columns of wider rows."""
    wide = randn(3, 90)
    actual = test_mlp.run("optimized", function, wide[:, 3:71], "silu")
    expected = test_mlp.run("optimized", function, wide[:, 3:71].clone(), "silu")
    assert_equal(actual, expected)


@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.parametrize("name", test_moe.CONFIGS)
def test_experts(name: str, count: int) -> None:
    """The same experts; weights and sums within their budgets."""
    test_moe.test_edge_sizes(name, count)


def test_experts_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of pairs are counted, and tiles are full."""
    monkeypatch.setattr(moe, "_COUNTED", 16)
    test_moe.test_edge_sizes("one expert", 97)
    test_moe.test_edge_sizes("plain", 33)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_functions_of_experts(activation: Activation, gated: bool) -> None:
    """Every inner function."""
    test_moe.test_activations(activation, gated, F32)


@pytest.mark.parametrize("name", test_moe.LOADS)
def test_loads(name: str) -> None:
    """However unevenly experts are visited, each pair has a place of its own."""
    test_moe.test_loads(name, F32)


@pytest.mark.parametrize("name", ["plain", "groups", "softmax"])
def test_padding_visits_no_expert(name: str) -> None:
    """Garbage stays out of all other tokens, and ends as zero."""
    test_moe.test_padding_harms_nobody(name, F32, torch.nan)


def test_wrong_tokens_and_ties() -> None:
    """A token's NaN stays its own; equal scores are broken by the lowest id."""
    test_moe.test_wrong_experts_harm_no_other_token()
    test_moe.test_ties("groups")


def edge_rows(kind: str, vocab_size: int, step: float) -> tuple[Tensor, Draws]:
    """Draw a few rows of a kind, with every filter in some of them."""
    source, count = random.Random(f"{kind} {step}"), 5
    logits = randn(count, vocab_size, seed=len(kind)) * 3
    logits = (logits / step).round() * step if step else logits
    for row in logits:
        for value in test_sampler.LOGITS[kind]:
            row[source.sample(range(vocab_size), vocab_size // 3 + 1)] = value
    fields: dict[str, list[Any]] = {
        "temperatures": [0.0, 0.7, 1e-45, 1.0, 1e38],
        "top_ks": [5, 0, 2, 7, vocab_size - 1],
        "top_ps": [0.5, 0.9, 1.0, 0.6, 1.0],
        "min_ps": [0.0, 0.1, 0.0, 0.0, source.choice([0.0, 0.5])],
        "seeds": source.choices(test_sampler.SEEDS, k=count),
        "positions": source.choices(test_sampler.POSITIONS, k=count),
    }
    banned = [source.sample(range(vocab_size), min(row, 2)) for row in range(count)]
    return logits, make_draws(count, banned_ids=banned, **fields)


@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize("kind", test_sampler.LOGITS)
def test_draws(kind: str, step: float) -> None:
    """Rows of every kind; coarse steps make many logits equal."""
    test_sampler.assert_same(*edge_rows(kind, 37, step))


def test_draws_from_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of one chunk meets those of others."""
    monkeypatch.setattr(sampler, "_CHUNK", 16)
    test_sampler.assert_same(*edge_rows("everything", 53, 0.5))
    logits = randn(3, 53).to(torch.bfloat16)
    logits[1, 16:32] = -torch.inf
    exact = torch.log_softmax(logits.double(), 1)
    actual = sampler.log_probabilities(logits)
    assert_equal(actual.isfinite(), exact.isfinite())
    is_finite = actual.isfinite()
    assert_budgeted("log_probabilities", actual[is_finite], exact[is_finite])


def test_draws_that_meet_top_p_exactly() -> None:
    """Shares that come to it exactly are enough, of tokens equal or not."""
    logits = torch.stack((torch.zeros(4), -torch.arange(4) * 1e4)).repeat(3, 1)
    draws = make_draws(6, temperatures=1.0, top_ps=0.5, positions=list(range(6)))
    test_sampler.assert_same(logits, draws)


def test_draws_in_company() -> None:
    """Padded draws take the largest."""
    logits, real = edge_rows("normal", 37, 0.0)
    filler = make_draws(1)._replace(banned_ids=torch.full((1, 2), -1))
    both = Draws(*(torch.cat(pair) for pair in zip(real, filler, strict=True)))
    tokens = test_sampler.sample("optimized", torch.cat((logits, logits[:1])), both)
    assert_equal(tokens[:5], test_sampler.sample("reference", logits, real))
    assert_equal(tokens[5:], logits[0].argmax()[None])


@pytest.mark.parametrize("num_rows", [0, 2])
def test_log_probabilities(num_rows: int) -> None:
    """A row of NaN stays by itself."""
    test_sampler.test_log_probabilities(num_rows, F32)
