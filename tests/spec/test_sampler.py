"""Draws: fair, repeatable, each its own; log-probabilities that sum to one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests import oracles
from tests.factories import at_alignment, load, make_draws, randn
from tests.tolerances import (
    SIGNIFICANCE,
    assert_budgeted,
    assert_consistent,
    assert_equal,
)

VOCAB = 37
DRAWS = 800
#: Counter, key and output of Random123's known-answer test.
KNOWN_ANSWERS = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
    (
        "243f6a8885a308d313198a2e03707344",
        "a4093822299f31d0",
        "d16cfe0994fdcceb5001e42024126ea1",
    ),
]
WORDS = st.integers(0, 2**32 - 1)


def words(text: str) -> tuple[int, ...]:
    """Cut hexadecimal digits into 32-bit words."""
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


def draw(
    side: str,
    logits: Tensor,
    temperature: float | list[float] = 1.0,
    seeds: int | list[int] = 0,
    positions: int | list[int] = 0,
    **filters: Any,
) -> list[int]:
    """Draw one token a row; single values hold for every row."""
    draws = make_draws(
        len(logits),
        temperatures=temperature,
        seeds=seeds,
        positions=positions,
        **filters,
    )
    return load(side, "sampler").sample(logits, draws).tolist()


def expected_draw(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """Draw one token in float64, with random words from Python integers."""
    best, best_value = 0, -math.inf
    for token, logit in enumerate(logits.tolist()):
        counter = (token, position % 2**32, position >> 32, 0)
        word = oracles.philox(counter, (seed % 2**32, seed >> 32))[0]
        uniform = ((word >> 9) + 0.5) / 2**23
        value = logit / temperature - math.log(-math.log(uniform))
        if value > best_value:
            best, best_value = token, value
    return best


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_oracle_knows_the_answers(counter: str, key: str, output: str) -> None:
    """The oracle's random words are Philox4x32-10."""
    assert oracles.philox(words(counter), words(key)) == words(output)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_reference_knows_the_answers(counter: str, key: str, output: str) -> None:
    """So are the reference's."""
    sampler = load("reference", "sampler")
    arrays = [torch.tensor([word]) for word in words(counter)]
    actual = sampler._philox(arrays, words(key))
    assert tuple(int(array) for array in actual) == words(output)


@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), key=st.tuples(WORDS, WORDS))
def test_reference_philox_equals_integers(
    counter: tuple[int, ...], key: tuple[int, int]
) -> None:
    """Products that overflow 64 signed bits lose nothing."""
    arrays = [torch.tensor([word]) for word in counter]
    actual = load("reference", "sampler")._philox(arrays, key)
    assert tuple(int(array) for array in actual) == oracles.philox(counter, key)


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**40),
    temperature=st.floats(0.1, 10),
)
def test_equals_the_formula(
    side: str, seed: int, position: int, temperature: float
) -> None:
    """The draw is the largest scaled logit plus noise keyed by seed and position."""
    logits = randn(1, VOCAB, seed=seed % 1000)
    temperature = float(torch.tensor(temperature))
    expected = expected_draw(logits[0], temperature, seed, position)
    assert draw(side, logits, temperature, seed, position) == [expected]


def test_greedy_takes_the_lowest_of_the_largest(side: str) -> None:
    """At temperature 0 the largest logit wins; of several, the lowest id."""
    for first in range(VOCAB):
        logits = randn(1, VOCAB)
        logits[0, first:] = 7.0
        assert draw(side, logits, 0.0) == [first]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(side: str, temperature: float) -> None:
    """Counts over many positions pass a chi-square test."""
    logits, positions = randn(8, seed=4), list(range(DRAWS))
    rows = logits.expand(DRAWS, -1)
    tokens = draw(side, rows, temperature, 123, positions)
    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    probabilities = torch.softmax(logits / temperature, 0)
    assert chi_square_tail(counts, probabilities) > SIGNIFICANCE


def test_seeds_are_independent(side: str) -> None:
    """Neighbouring seeds share no more draws than chance has them share."""
    logits, positions = torch.zeros(DRAWS, 4), list(range(DRAWS))
    one, two = (
        torch.tensor(draw(side, logits, seeds=seed, positions=positions))
        for seed in (5, 6)
    )
    counts = torch.bincount(one * 4 + two, minlength=16).double()
    assert chi_square_tail(counts, torch.full((16,), 1 / 16)) > SIGNIFICANCE


def chi_square_tail(counts: Tensor, probabilities: Tensor) -> float:
    """Return the probability of a larger chi-square statistic."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@given(order=st.permutations(range(6)))
def test_company_changes_nothing(side: str, order: list[int]) -> None:
    """A row's draw does not depend on the rows around it, greedy or random."""
    logits = randn(6, VOCAB)
    temperatures, seeds = [0.0, 1.0, 0.3, 0.0, 5.0, 1.0], [0, 1, 2**62, 3, 1, 1]
    positions = [4, 5, 6, 2**33, 5, 6]
    filters: dict[str, list[Any]] = {
        "top_ks": [0, 3, 0, 1, 7, 0],
        "top_ps": [1.0, 0.5, 0.9, 0.1, 1.0, 0.3],
        "min_ps": [0.0, 0.0, 0.2, 0.5, 0.0, 0.1],
        "banned_ids": [[], [3, 4, 5], [], [1], [0, 36], []],
    }

    def entries(rows: list[int]) -> dict[str, Any]:
        return {name: [values[i] for i in rows] for name, values in filters.items()}

    alone = [
        draw(
            side,
            logits[i : i + 1].clone(),
            temperatures[i],
            seeds[i],
            positions[i],
            **entries([i]),
        )[0]
        for i in range(6)
    ]
    together = draw(
        side,
        logits[order],
        [temperatures[i] for i in order],
        [seeds[i] for i in order],
        [positions[i] for i in order],
        **entries(order),
    )
    assert together == [alone[i] for i in order]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-6, 1.0, 1e38])
def test_extreme_rows(side: str, temperature: float) -> None:
    """Forbidden tokens are never drawn; equal or wholly forbidden rows are safe."""
    logits = torch.full((4, VOCAB), -torch.inf)
    logits[0, 5] = 3.0
    logits[1] = 0.0
    logits[2, [7, 9]] = torch.tensor([1e38, -1e38])
    tokens = draw(side, logits, temperature, positions=[1, 2, 3, 4])
    assert tokens[0] == 5
    assert tokens[2] in ((7,) if temperature < 1e30 else (7, 9))
    assert all(0 <= token < VOCAB for token in tokens)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30])
def test_tiny_temperatures_take_the_largest(side: str, temperature: float) -> None:
    """A temperature that overflows a quotient still finds the largest logit."""
    logits = randn(6, VOCAB) * 50
    assert draw(side, logits, temperature) == draw(side, logits, 0.0)


def test_log_probabilities(side: str) -> None:
    """They are the logarithm of the softmax, of a row alone, at any alignment."""
    function = load(side, "sampler").log_probabilities
    logits = randn(18, VOCAB) * 10
    logits[0, :5] = -torch.inf
    together = function(logits)
    exact = logits.double() - logits.double().logsumexp(1, keepdim=True)
    assert_equal(together[0, :5], logits[0, :5])
    assert_budgeted("log_probabilities", together[1:], exact[1:])
    for row in range(len(logits)):
        alone = function(at_alignment(logits[row : row + 1], row))
        part = together[row : row + 1]
        is_real = part.isfinite()
        assert_equal(part[~is_real], alone[~is_real])
        assert_consistent(side, "log_probabilities", part[is_real], alone[is_real])


def test_no_rows(side: str) -> None:
    """A step may draw nothing."""
    nothing = torch.zeros(0, VOCAB)
    assert draw(side, nothing) == []
    assert_equal(load(side, "sampler").log_probabilities(nothing), nothing)


# Filters.

#: Few values, so that many logits are equal.
FEW_LOGITS = st.lists(
    st.sampled_from([-math.inf, -2.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=7
)


def allowed_tokens(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    banned: list[int],
) -> set[int]:
    """Say by definition which tokens may be drawn."""
    best = max((v for i, v in enumerate(logits) if i not in banned), default=0.0)
    weights = {
        token: math.exp((logit - best) / temperature)
        for token, logit in enumerate(logits)
        if token not in banned
    }
    order = sorted(weights, key=lambda token: (-weights[token], token))
    if top_k:
        order = order[:top_k]
    total = math.fsum(weights[token] for token in order)
    if top_p < 1:
        for count in range(1, len(order) + 1):
            mass = math.fsum(weights[token] for token in order[:count])
            # Where rounding decides, the definition does not say.
            assume(abs(mass - top_p * total) > 1e-5 * total)
            if mass >= top_p * total:
                order = order[:count]
                break
    largest = max(weights[token] for token in order)
    assume(all(abs(weights[t] - min_p * largest) > 1e-5 for t in order))
    return {token for token in order if weights[token] >= min_p * largest}


@given(
    logits=FEW_LOGITS,
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
    banned=st.lists(st.integers(0, 6), unique=True, max_size=4),
    seed=st.integers(0, 2**63 - 1),
)
def test_filters_equal_their_definition(
    side: str,
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    banned: list[int],
    seed: int,
) -> None:
    """A draw is the noisy maximum over exactly the tokens that the filters leave."""
    banned = [token for token in banned if token < len(logits)]
    free = [v for token, v in enumerate(logits) if token not in banned]
    assume(any(value > -math.inf for value in free))
    allowed = allowed_tokens(logits, temperature, top_k, top_p, min_p, banned)
    masked = [v if t in allowed else -math.inf for t, v in enumerate(logits)]
    rows = torch.tensor([logits] * 12)
    drawn = draw(
        side,
        rows,
        temperature,
        seed,
        positions=list(range(12)),
        top_ks=top_k,
        top_ps=top_p,
        min_ps=min_p,
        banned_ids=[banned] * 12,
    )
    assert drawn == [
        expected_draw(torch.tensor(masked), temperature, seed, position)
        for position in range(12)
    ]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"top_ks": 3}, 3),
        ({"top_ps": 0.7}, 3),
        ({"min_ps": 0.3}, 4),
        ({"top_ks": 5, "top_ps": 0.9}, 4),
        ({"top_ks": 5, "top_ps": 0.95, "min_ps": 0.3}, 4),
        ({"banned_ids": [[0, 2]] * DRAWS}, 6),
    ],
)
def test_filtered_draws_follow_the_filtered_softmax(
    side: str, filters: dict[str, Any], left: int
) -> None:
    """Counts pass a chi-square test over what is left; nothing else comes."""
    probabilities = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02])
    banned: list[int] = filters.get("banned_ids", [[]])[0]
    kept = [token for token in range(8) if token not in banned][:left]
    tokens = draw(
        side,
        probabilities.log().expand(DRAWS, -1),
        seeds=99,
        positions=list(range(DRAWS)),
        **filters,
    )
    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    assert counts[kept].sum() == DRAWS
    share = probabilities[kept] / probabilities[kept].sum()
    assert chi_square_tail(counts[kept], share) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        *(({"top_ks": k}, k) for k in (1, 2, 3, 9)),
        *(({"top_ps": p / 10}, p) for p in (1, 3, 7, 9)),
        ({"top_ps": 0.31}, 4),
        ({"top_ps": 1e-9}, 1),
        ({"top_ks": 10}, 10),
        ({"top_ks": 2**63 - 1}, 10),
        ({"min_ps": 1.0}, 10),
        ({"top_ks": 4, "top_ps": 0.5}, 2),
    ],
)
def test_of_equals_the_lowest_ids_stay(
    side: str, filters: dict[str, Any], left: int
) -> None:
    """Ten equal tokens: exactly as many stay as asked for, from the lowest id on."""
    tokens = draw(
        side, torch.zeros(200, 10), 1.0, 5, positions=list(range(200)), **filters
    )
    assert set(tokens) == set(range(left))


def test_greedy_ignores_filters_but_not_bans(side: str) -> None:
    """At temperature 0 the largest logit wins, of those that may come."""
    logits = randn(1, VOCAB)
    order = torch.sort(logits[0], descending=True).indices.tolist()
    strict: dict[str, Any] = {"top_ks": 3, "top_ps": 0.1, "min_ps": 0.9}
    assert draw(side, logits, 0.0, **strict) == order[:1]
    banned: dict[str, Any] = {"banned_ids": [order[:5]]}
    assert draw(side, logits, 0.0, **strict, **banned) == order[5:6]
    for seed in range(30):
        drawn = draw(side, logits, 1.0, seed, top_ks=2, **banned)
        assert drawn[0] in order[5:7]


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1.0, 1e38])
@pytest.mark.parametrize("filters", [{"top_ks": 2}, {"top_ps": 0.5}, {"min_ps": 0.5}])
def test_extreme_rows_pass_the_filters(
    side: str, temperature: float, filters: dict[str, Any]
) -> None:
    """Forbidden tokens are not let in; a wholly forbidden row is safe."""
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 5] = 3.0
    logits[1, [7, 9]] = torch.tensor([1e38, -1e38])
    tokens = draw(side, logits, temperature, positions=[1, 2, 3], **filters)
    assert tokens[0] == 5
    assert tokens[1] in ((7,) if temperature < 1e30 else (7, 9))
    assert 0 <= tokens[2] < VOCAB
