"""Draws of all rows at once against one by one: the same tokens, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.batch import Draws
from tests import oracles
from tests.factories import load, make_draws, randn
from tests.host_reads import no_host_reads
from tests.tolerances import assert_budgeted, assert_equal

INF, NAN = torch.inf, torch.nan
VOCABS = (1, 2, 37, 64, 257)
#: What takes part of the logits, or all.
LOGITS = {
    "normal": [],
    "forbidden": [-INF],
    "wholly forbidden": [-INF] * 7,
    "infinite": [INF],
    "not a number": [NAN],
    "everything": [-INF, INF, NAN, 0.0, 1e38, -1e38],
}
#: Values of every field of `Draws` that a filter or the generator treats apart.
TEMPERATURES = [0.0, 1e-45, 1e-38, 1e-6, 0.1, 0.7, 1.0, 3.3, 10.0, 1e38]
TOP_PS = [1.0, 0.999999, 0.9, 0.75, 0.7, 0.5, 0.3, 0.25, 0.1, 1e-9]
MIN_PS = [0.0, 0.0, 1e-9, 0.1, 0.5, 1.0]
SEEDS = [0, 1, 123456789123, 2**62, 2**63 - 1, -1, -(2**63)]
POSITIONS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 3, 2**62]


def sample(side: str, logits: Tensor, draws: Draws) -> Tensor:
    """Draw on one side."""
    return load(side, "sampler").sample(logits, draws)


def assert_same(logits: Tensor, draws: Draws) -> None:
    """Hold the tokens of both sides equal."""
    assert_equal(sample("optimized", logits, draws), sample("reference", logits, draws))


def random_draws(count: int, vocab_size: int, source: random.Random) -> Draws:
    """Pick every field of every row from its edge values."""
    top_ks = [0, 0, 1, 2, vocab_size - 1, vocab_size, vocab_size + 1, 2**63 - 1]
    counts = [0, 0, 1, 2, vocab_size - 1, vocab_size]
    banned = [
        source.sample(range(vocab_size), min(vocab_size, source.choice(counts)))
        for _ in range(count)
    ]
    fields: dict[str, list[Any]] = {
        "temperatures": TEMPERATURES,
        "top_ks": top_ks,
        "top_ps": TOP_PS,
        "min_ps": MIN_PS,
        "seeds": SEEDS,
        "positions": POSITIONS,
    }
    picked = {name: source.choices(values, k=count) for name, values in fields.items()}
    return make_draws(count, banned_ids=banned, **picked)


def take(draws: Draws, rows: Any) -> Draws:
    """Pick rows."""
    return Draws(*(entry[rows] for entry in draws))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("step", [0.0, 0.5, 1e-3])
def test_rows_of_every_kind(kind: str, vocab_size: int, step: float) -> None:
    """Any edge value beside any other; coarse steps make many logits equal."""
    source = random.Random(f"{kind} {vocab_size} {step}")
    logits = (randn(120, vocab_size, seed=vocab_size) * 3 / (step or 1)).round() * step
    for row in logits:
        for value in LOGITS[kind]:
            row[source.sample(range(vocab_size), vocab_size // 3 + 1)] = value
    assert_same(logits, random_draws(120, vocab_size, source))


@given(data=st.data(), vocab_size=st.integers(1, 9))
def test_any_row(data: st.DataObject, vocab_size: int) -> None:
    """Rows that nobody thought of."""
    value = st.floats(-4, 4, width=32) | st.sampled_from([-INF, 0.0, 1.0])
    logits = data.draw(st.lists(value, min_size=vocab_size, max_size=vocab_size))
    banned = st.lists(st.integers(0, vocab_size - 1), unique=True)
    draws = make_draws(
        1,
        temperatures=data.draw(st.floats(0, 10, width=32)),
        top_ks=data.draw(st.integers(0, 10)),
        top_ps=data.draw(st.floats(0, 1, exclude_min=True)),
        min_ps=data.draw(st.floats(0, 1)),
        seeds=data.draw(st.integers(-(2**63), 2**63 - 1)),
        positions=data.draw(st.integers(0, 2**40)),
        banned_ids=[data.draw(banned)],
    )
    assert_same(torch.tensor([logits]), draws)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_met_exactly(top_p: float) -> None:
    """Shares that come to it exactly are enough, of tokens equal or not."""
    equal, halves = torch.zeros(4), -torch.arange(4) * 1e4
    logits = torch.stack((equal, halves)).repeat(60, 1)
    draws = make_draws(120, temperatures=1.0, top_ps=top_p, positions=list(range(120)))
    assert_same(logits, draws)
    assert sample("optimized", logits, draws)[::2].max() == 4 * top_p - 1


def test_one_token_is_left() -> None:
    """Wherever all others are banned, whatever else is asked for, it is drawn."""
    banned = [[token for token in range(37) if token != left] for left in range(37)]
    for temperature in TEMPERATURES:
        draws = make_draws(
            37, temperatures=temperature, banned_ids=banned, top_ps=0.5, top_ks=1
        )
        assert_equal(sample("optimized", randn(37, 37), draws), torch.arange(37))
        assert_same(randn(37, 37), draws)


def test_a_large_vocabulary() -> None:
    """Sorting and summing many values changes nothing."""
    source = random.Random(5)
    assert_same(randn(24, 20011) * 4, random_draws(24, 20011, source))


@pytest.mark.parametrize("top_k", [0, 70])
def test_top_p_is_judged_in_float64(top_k: int) -> None:
    """Shares between a sum and the same in float32 part what is kept from the rest."""
    values = randn(99).sort(descending=True).values
    values = values - values[0]
    sums = values[: top_k or 99].double().exp().cumsum(0)
    shares = (sums + sums.float()) / 2 / sums[-1]
    draws = make_draws(len(sums), top_ks=top_k)._replace(top_ps=shares)
    scaled = values.expand(len(sums), -1)
    actual = load("optimized", "sampler")._is_likely(scaled, draws)
    likeliest = load("reference", "sampler")._likeliest
    kept = [len(likeliest(values, take(draws, row))) for row in range(len(sums))]
    assert_equal(actual.sum(1), torch.tensor(kept))


@pytest.mark.parametrize("num_logits", [1, 37, 111, 185])
def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch, num_logits: int) -> None:
    """Where memory bounds the rows at once, their tokens stay the same."""
    logits, draws = randn(11, 37), random_draws(11, 37, random.Random(3))
    expected = sample("optimized", logits, draws)
    monkeypatch.setattr(load("optimized", "sampler"), "_MAX_LOGITS", num_logits)
    assert_equal(sample("optimized", logits, draws), expected)


def test_company_changes_nothing() -> None:
    """Each row draws what it draws alone, beside rows of garbage too."""
    logits, draws = randn(40, 37), random_draws(40, 37, random.Random(4))
    logits[1::2] = torch.tensor([NAN, INF, -INF, 0]).repeat(5)[:, None]
    together = sample("optimized", logits, draws)
    rows = [slice(row, row + 1) for row in range(40)]
    alone = [sample("optimized", logits[row], take(draws, row)) for row in rows]
    assert_equal(together, torch.cat(alone))


def test_padded_draws_are_greedy() -> None:
    """Draws that only fill an array change nobody and take the largest."""
    real, filler = random_draws(5, 37, random.Random(6)), make_draws(3)
    width = real.banned_ids.shape[1]
    filler = filler._replace(banned_ids=torch.full((3, width), -1))
    draws = Draws(*(torch.cat(pair) for pair in zip(real, filler, strict=True)))
    logits = randn(5, 37)
    tokens = sample("optimized", torch.cat((logits, logits[[0, 0, 0]])), draws)
    assert_equal(tokens[:5], sample("reference", logits, real))
    assert_equal(tokens[5:], logits[0].argmax().expand(3))


@given(data=st.data())
def test_philox_equals_integers(data: st.DataObject) -> None:
    """Words of many counters and keys at once, each by itself in whole numbers."""
    words = st.integers(0, 2**32 - 1)
    rows = data.draw(st.lists(st.tuples(*[words] * 6), min_size=1, max_size=4))
    columns = torch.tensor(rows).T
    philox = load("optimized", "sampler")._philox
    actual = philox(list(columns[:4]), (columns[4], columns[5]))
    expected = [oracles.philox(row[:4], row[4:]) for row in rows]
    assert_equal(torch.stack(actual, 1), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_log_probabilities(num_rows: int, dtype: torch.dtype) -> None:
    """Float32 of logits of any width; a row of NaN stays by itself."""
    logits = torch.cat((randn(num_rows, 61) * 9, torch.full((1, 61), NAN))).to(dtype)
    actual, expected = (
        load(side, "sampler").log_probabilities(logits)
        for side in ("optimized", "reference")
    )
    assert actual.dtype == torch.float32
    assert_equal(actual[num_rows:], expected[num_rows:])
    assert_budgeted("log_probabilities", actual[:-1], expected[:-1])


def test_nothing_is_read_back() -> None:
    """The host never waits for a number from the device."""
    logits, draws = randn(9, 37), random_draws(9, 37, random.Random(7))
    sampler = load("optimized", "sampler")
    with no_host_reads():
        sampler.sample(logits, draws)
        sampler.log_probabilities(logits)
