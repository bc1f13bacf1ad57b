"""Draws of the next token, each a function of its own logits and `Draws` alone.

Filters first take tokens away: banned ones, then, at the given temperature, all but the
likeliest by top-k, top-p and min-p, in this order. A draw then adds Gumbel noise to the
scaled logits and takes the largest. The noise of a token comes from a counter-based
generator, keyed by the request's seed and counting (token id, position), so that
neither company nor preemption nor the order of draws can change a request's tokens.

Source: Gumbel 1954 and Maddison et al. 2014, "A* Sampling", arXiv 1411.0030, section 2
(the Gumbel-max trick); Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2,
3", section 3.3 (Philox).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.batch import Draws
from lockstep.shapes import Logits, PerRow

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def sample(logits: Logits, draws: Draws) -> PerRow:
    """Draw one token for each row.

    Args:
        logits: Float32 logits; -inf forbids a token.
        draws: How each is drawn.

    Returns:
        Token ids. Where values tie, the lowest id is drawn.
    """
    token_ids = torch.empty_like(draws.seeds)
    for row, token_id, *draw in zip(logits, token_ids, *draws, strict=True):
        token_id.copy_(_draw(row, Draws(*draw)))
    return token_ids


def log_probabilities(logits: Logits) -> Logits:
    """Return the logarithm of each token's probability at temperature 1, in float32.

    Args:
        logits: One row a position.
    """
    outputs = torch.empty_like(logits, dtype=torch.float32)
    for row, output in zip(logits, outputs, strict=True):
        output.copy_(torch.log_softmax(row.to(torch.float32, copy=True), dim=0))
    return outputs


def _draw(row: Tensor, draw: Draws) -> Tensor:
    """Draw one token.

    Args:
        row: Its logits.
        draw: The entries of this row alone.
    """
    values = torch.clone(row)
    values[draw.banned_ids[draw.banned_ids >= 0]] = -torch.inf
    if draw.temperatures > 0:
        # Measured from the largest, so that no temperature is too small to divide by
        # and the noise keeps its digits where the choice is made.
        values = (values - values.max()) / draw.temperatures
        likeliest = _likeliest(values, draw)
        noise = _gumbel_noise(
            len(row), int(draw.seeds), int(draw.positions), row.device
        )
        noisy = torch.full_like(values, -torch.inf)
        noisy[likeliest] = values[likeliest] + noise[likeliest]
        values = noisy
    return _lowest_argmax(values)


def _likeliest(values: Tensor, draw: Draws) -> Tensor:
    """Return the ids that the filters leave, the likeliest first, ties by lowest id.

    Each filter judges what the one before has left. Shares are added in float64, so
    that rounding hardly ever decides; where they come to ``top_p`` exactly, that is
    enough.

    Args:
        values: Scaled logits of one row, the largest 0.
        draw: The entries of this row alone.
    """
    order = torch.sort(values, descending=True, stable=True).indices
    if draw.top_ks > 0:
        order = order[: int(draw.top_ks)]
    masses = torch.exp(values[order].double())
    if draw.top_ps < 1:
        sums = masses.cumsum(0)
        too_few = sums < draw.top_ps * sums[-1]
        order = order[: int(too_few.sum()) + 1]
    if draw.min_ps > 0:
        order = order[masses[: len(order)] >= draw.min_ps]
    return order


def _lowest_argmax(values: Tensor) -> Tensor:
    """Return the lowest id of the largest value; NaN counts as largest, as in torch."""
    is_largest = (values == values.max()) | values.isnan()
    return is_largest.nonzero()[0, 0]


def _gumbel_noise(
    vocab_size: int, seed: int, position: int, device: torch.device
) -> Tensor:
    """Return one standard Gumbel number for each token id, in float32."""
    token_ids = torch.arange(vocab_size, device=device)
    counter = [token_ids] + [
        torch.full_like(token_ids, word)
        for word in (position & _MASK, position >> 32 & _MASK, 0)
    ]
    word = _philox(counter, (seed & _MASK, seed >> 32 & _MASK))[0]
    # The middle of one of 2^23 equal pieces of (0, 1): exact, and never 0 or 1.
    uniform = ((word >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Turn counters into random words by Philox4x32-10.

    Args:
        counter: Four int64 arrays of 32-bit words.
        key: Two 32-bit words.

    Returns:
        Four int64 arrays of 32-bit words.
    """
    for index in range(_ROUNDS):
        high_0, low_0 = _multiply(counter[0], _MULTIPLIERS[0])
        high_2, low_2 = _multiply(counter[2], _MULTIPLIERS[1])
        key_0, key_1 = (
            (word + index * step) & _MASK
            for word, step in zip(key, _KEY_STEPS, strict=True)
        )
        counter = [
            high_2 ^ counter[1] ^ key_0,
            low_2,
            high_0 ^ counter[3] ^ key_1,
            low_0,
        ]
    return counter


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of 32-bit products.

    Torch has no unsigned arithmetic, but int64 products wrap without losing a bit.
    """
    product = words * factor
    return product >> 32 & _MASK, product & _MASK
