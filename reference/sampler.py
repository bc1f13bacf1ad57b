"""Draws of the next token, each a function of logits, seed and position alone.

A draw adds Gumbel noise to the scaled logits and takes the largest. The noise of a
token comes from a counter-based generator, keyed by the request's seed and counting
(token id, position), so that neither company nor preemption nor the order of draws can
change a request's tokens.

Source: Gumbel 1954 and Maddison et al. 2014, "A* Sampling", arXiv 1411.0030, section 2
(the Gumbel-max trick); Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2,
3", section 3.3 (Philox).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.shapes import Logits, PerRow, RowTemperatures

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def sample(
    logits: Logits, temperatures: RowTemperatures, seeds: PerRow, positions: PerRow
) -> PerRow:
    """Draw one token for each row.

    Args:
        logits: Float32 logits; -inf forbids a token.
        temperatures: Divides the logits; 0 takes the largest logit.
        seeds: Key of the row's draws; read as 64 unsigned bits.
        positions: Position that the drawn token will have.

    Returns:
        Token ids. Where values tie, the lowest id is drawn.
    """
    token_ids = torch.empty_like(positions)
    rows = zip(
        logits, temperatures, seeds.tolist(), positions.tolist(), token_ids, strict=True
    )
    for row, temperature, seed, position, token_id in rows:
        values = torch.clone(row)
        if temperature > 0:
            # Measured from the largest, so that no temperature is too small to divide
            # by and the noise keeps its digits where the choice is made.
            values = (values - values.max()) / temperature
            values = values + _gumbel_noise(len(row), seed, position, row.device)
        token_id.copy_(_lowest_argmax(values))
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
