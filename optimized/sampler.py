"""Draws of all rows at once, greedy or random, filtered or not, without asking which.

What a row does not want is computed for it too and left out by a mask: a filter that is
off leaves everything, a greedy row ignores its noise. So the vocabulary is sorted even
where no row of a step filters: to know that, the host would have to ask the device.

On a CPU rows are drawn as the reference draws them, bit for bit where logits are equal;
so they are on a GPU, but for a top-p whose shares come within a rounding of it: sums of
float64 are associated otherwise there.
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

#: Logits that are worked on at once; each takes about 90 bytes meanwhile.
_MAX_LOGITS = 1 << 22


def sample(logits: Logits, draws: Draws) -> PerRow:
    """Draw one token for each row, as many rows at once as memory bounds.

    Cost: for each logit a stable sort and about a hundred int64 operations of the
    generator, in some 220 launches for every four million logits; about 90 bytes for
    each of these, 400 MB at most.
    """
    num_rows = max(1, _MAX_LOGITS // logits.shape[1])
    parts = zip(
        logits.split(num_rows), *(entry.split(num_rows) for entry in draws), strict=True
    )
    return torch.cat([_draw(rows, Draws(*entries)) for rows, *entries in parts])


def log_probabilities(logits: Logits) -> Logits:
    """Return all rows' logarithms from one launch."""
    return torch.log_softmax(logits, dim=1, dtype=torch.float32)


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draw one token for each row; ``argmax`` takes the lowest id, and NaN first."""
    values = logits.masked_fill(_is_banned(draws.banned_ids, logits), -torch.inf)
    temperatures = draws.temperatures[:, None]
    is_random = temperatures > 0
    scaled = values - values.amax(1, keepdim=True)
    scaled = scaled / temperatures.where(is_random, 1)
    noisy = scaled + _gumbel_noise(logits.shape[1], draws.seeds, draws.positions)
    noisy = noisy.where(_is_likely(scaled, draws), -torch.inf)
    return noisy.where(is_random, values).argmax(1)


def _is_banned(banned_ids: Tensor, logits: Tensor) -> Tensor:
    """Mark the banned tokens; what fills the lists marks a column that is cut off."""
    num_rows, vocab_size = logits.shape
    marks = logits.new_zeros(num_rows, vocab_size + 1, dtype=torch.bool)
    marks.scatter_(1, banned_ids.where(banned_ids >= 0, vocab_size), True)
    return marks[:, :vocab_size]


def _is_likely(scaled: Tensor, draws: Draws) -> Tensor:
    """Mark the tokens that the filters leave, each judging what was left before it."""
    vocab_size = scaled.shape[1]
    top_ks, top_ps, min_ps = (
        entry[:, None] for entry in (draws.top_ks, draws.top_ps, draws.min_ps)
    )
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=scaled.device)
    num_left = top_ks.where(top_ks > 0, vocab_size).clamp(max=vocab_size)
    is_left = ranks < num_left
    masses = ordered.double().exp_()
    sums = masses.cumsum(1)
    is_too_few = sums < top_ps * sums.gather(1, num_left - 1)
    num_enough = is_too_few.sum(1, keepdim=True) + 1
    is_left &= (ranks < num_enough) | ~(top_ps < 1)
    is_left &= (masses >= min_ps) | ~(min_ps > 0)
    return torch.zeros_like(is_left).scatter_(1, order, is_left)


def _gumbel_noise(vocab_size: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the numbers of every row and token: (rows, vocab)."""
    token_ids = torch.arange(vocab_size, device=seeds.device)
    seeds, positions = seeds[:, None], positions[:, None]
    # Words that rows or tokens share stay as small as they are while they can.
    counter = [
        token_ids,
        positions & _MASK,
        positions >> 32 & _MASK,
        torch.zeros_like(positions),
    ]
    word = _philox(counter, (seeds & _MASK, seeds >> 32 & _MASK))[0]
    uniform = ((word >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _philox(counter: list[Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Turn counters into random words by Philox4x32-10; all broadcast to each other."""
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
    """Return the high and the low word of 32-bit products."""
    product = words * factor
    return product >> 32 & _MASK, product & _MASK
