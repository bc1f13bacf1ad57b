"""Draws in four launches, each row by what it wants, without asking on the host.

Rows are cut into chunks of the vocabulary, so that one row too fills the device; the
best of the chunks are compared in a launch of its own. A greedy row is read once. A
random one is read again, with noise. Only a row with top-k or top-p has its threshold
searched, by one program, while those of other rows return at once.

The search does not sort. Scaled logits are at most 0, and the bits of a float without
its sign are ordered as its absolute value is: a *depth*. The search narrows down, a few
probes at a time, the least depth down to which tokens count or weigh enough. Of tokens
at that very depth, which are equal, the lowest ids stay. So a row keeps the tokens that
it keeps on the other side: counts are whole numbers, and shares are added in float64,
whose rounding hardly ever decides. Quotients, noise and shares are the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.batch import Draws
from lockstep.shapes import Logits, PerRow

from .exact import exact_divide

#: Tokens that a program looks at, or a search at a time, and depths that it probes.
_CHUNK = 2048
_SEARCHED = 1024
_PROBES = 8

_INFINITE_DEPTH = tl.constexpr(0x7F800000)
_NO_ID = tl.constexpr(2**31 - 1)


def sample(logits: Logits, draws: Draws) -> PerRow:
    """Draw all rows.

    Cost: four launches, of which a greedy row reads its logits in one, a random one in
    two; a filtered one reads them about ten times more for each filter that needs
    sums. Memory is two numbers for each chunk.
    """
    num_rows, vocab_size = logits.shape
    outputs = torch.empty_like(draws.seeds)
    if not num_rows:
        return outputs
    chunk = min(_CHUNK, triton.next_power_of_2(vocab_size))
    num_chunks = triton.cdiv(vocab_size, chunk)
    shape = 2, num_rows, num_chunks
    tops, noisy_tops = logits.new_empty(shape, dtype=torch.float32)
    ids, noisy_ids = logits.new_empty(shape, dtype=torch.int32)
    row_tops = logits.new_empty(num_rows, dtype=torch.float32)
    limits = logits.new_empty(num_rows, 2, dtype=torch.int32)
    assert logits.stride(1) == 1
    banned_ids = draws.banned_ids.contiguous()
    rows = logits, banned_ids, vocab_size, banned_ids.shape[1], logits.stride(0)
    chunks_block = triton.next_power_of_2(num_chunks)
    every_chunk = (num_rows, num_chunks)
    _top_kernel[every_chunk](*rows, tops, ids, CHUNK=chunk)
    _filter_kernel[(num_rows,)](
        *rows, *(draws.temperatures, draws.top_ks, draws.top_ps, draws.min_ps),
        *(tops, ids, row_tops, limits, outputs),
        NUM_CHUNKS=num_chunks, CHUNKS_BLOCK=chunks_block, CHUNK=_SEARCHED,
        PROBES=_PROBES, num_warps=16,
    )  # fmt: skip
    _draw_kernel[every_chunk](
        *rows, *(draws.temperatures, draws.min_ps, draws.seeds, draws.positions),
        *(row_tops, limits, noisy_tops, noisy_ids),
        CHUNK=chunk, enable_fp_fusion=False,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        *(draws.temperatures, row_tops, noisy_tops, noisy_ids, outputs),
        NUM_CHUNKS=num_chunks, CHUNKS_BLOCK=chunks_block, num_warps=1,
    )  # fmt: skip
    return outputs


def log_probabilities(logits: Logits) -> Logits:
    """Add up chunks of rows in one launch, and finish them in another.

    Cost: logits are read twice, the second time mostly from the cache.
    """
    num_rows, vocab_size = logits.shape
    outputs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return outputs
    chunk = min(_CHUNK, triton.next_power_of_2(vocab_size))
    num_chunks = triton.cdiv(vocab_size, chunk)
    shape = 2, num_rows, num_chunks
    tops, totals = logits.new_empty(shape, dtype=torch.float32)
    assert logits.stride(1) == 1
    _sum_kernel[(num_rows, num_chunks)](
        logits, tops, totals, vocab_size, logits.stride(0), CHUNK=chunk
    )
    _log_kernel[(num_rows, num_chunks)](
        logits, tops, totals, outputs, vocab_size, logits.stride(0),
        NUM_CHUNKS=num_chunks, CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
    )  # fmt: skip
    return outputs


@triton.jit
def _first_largest(values, ids):
    """Return the largest value and the lowest id that has it; NaN counts as largest."""
    is_nan = values != values
    largest = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    is_best = is_nan | ((values == largest) & (has_nan == 0))
    largest = tl.where(has_nan, float("nan"), largest)
    return largest, tl.min(tl.where(is_best, ids, _NO_ID), 0)


@triton.jit
def _load_values(row, ids):
    """Read logits of one row; banned tokens, and ids past the last, have none."""
    logits, banned_ids, vocab_size, num_banned, _, _ = row
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    for index in range(num_banned):
        banned = tl.load(banned_ids + index)
        values = tl.where(ids == banned, float("-inf"), values)
    return values.to(tl.float32)


@triton.jit
def _load_scaled(row, ids):
    """Read scaled logits of one row, the largest of which is 0."""
    _, _, _, _, row_top, temperature = row
    return exact_divide(_load_values(row, ids) - row_top, temperature)


@triton.jit
def _depths(scaled):
    """Return the bits of scaled logits without their sign, which order them."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _masses(depths):
    """Return the probabilities, as shares of the largest, of tokens at some depths."""
    return tl.exp(-depths.to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit(do_not_specialize=["num_banned"])
def _top_kernel(
    logits, banned_ids, vocab_size, num_banned, row_stride, tops, top_ids,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of a chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits, banned_ids = logits + row * row_stride, banned_ids + row * num_banned
    source = (logits, banned_ids, vocab_size, num_banned, 0.0, 1.0)
    values = _load_values(source, ids)
    top, top_id = _first_largest(values, ids)
    place = row * tl.num_programs(1) + chunk
    tl.store(tops + place, top)
    tl.store(top_ids + place, top_id)


@triton.jit
def _weigh_down_to(
    depth, row,
    IS_COUNT: tl.constexpr, CHUNK: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Count or weigh the tokens down to each of some depths, in float64."""
    vocab_size = row[2]
    sums = tl.zeros([CHUNK, PROBES], tl.float64)
    for first in tl.range(0, vocab_size, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        depths = _depths(_load_scaled(row, ids))
        weights = tl.full([CHUNK], 1, tl.float64) if IS_COUNT else _masses(depths)
        # Ids past the last are deepest, as forbidden tokens are, but are none.
        weights = tl.where(ids < vocab_size, weights, 0)
        is_above = depths[:, None] <= depth[None, :]
        sums += tl.where(is_above, weights[:, None], 0)
    return tl.sum(sums, 0)


@triton.jit
def _search(
    goal, deepest, row,
    IS_COUNT: tl.constexpr, CHUNK: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Return the least depth down to which tokens reach a goal, and what is above it.

    They must reach it down to the deepest one; more than that it never returns.
    """
    least, enough, above = deepest * 0 - 1, deepest, goal * 0
    while enough - least > 1:
        step = (enough - least + PROBES - 1) // PROBES
        probes = tl.minimum(least + step * (1 + tl.arange(0, PROBES)), enough)
        sums = _weigh_down_to(probes, row, IS_COUNT, CHUNK, PROBES)
        is_enough = (sums >= goal) | (probes == enough)
        enough = tl.min(tl.where(is_enough, probes, enough), 0)
        least = tl.max(tl.where(is_enough, least, probes), 0)
        above = tl.max(tl.where(is_enough, above, sums), 0)
    return enough, above


@triton.jit
def _find_tie(depth, num_kept, row, CHUNK: tl.constexpr):
    """Return the highest id of the first tokens at a depth, as many as are kept."""
    vocab_size = row[2]
    num_before, last = vocab_size * 0, vocab_size * 0 - 1
    for first in range(0, vocab_size, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        depths = _depths(_load_scaled(row, ids))
        is_tie = ((depths == depth) & (ids < vocab_size)).to(tl.int32)
        rank = num_before + tl.cumsum(is_tie, 0)
        is_kept = (is_tie > 0) & (rank <= num_kept)
        last = tl.maximum(last, tl.max(tl.where(is_kept, ids, -1), 0))
        num_before += tl.sum(is_tie, 0)
    return last


@triton.jit(do_not_specialize=["num_banned"])
def _filter_kernel(
    logits, banned_ids, vocab_size, num_banned, row_stride, temperatures, top_ks,
    top_ps, min_ps, tops, top_ids, row_tops, limits, outputs,
    NUM_CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PROBES: tl.constexpr,
):  # fmt: skip
    """Find a row's largest logit; then where its filters end, if it has any.

    A row is settled here if it is greedy, or if its largest logit is no finite number.
    """
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    place, is_chunk = row * NUM_CHUNKS + chunks, chunks < NUM_CHUNKS
    values = tl.load(tops + place, mask=is_chunk, other=float("-inf"))
    ids = tl.load(top_ids + place, mask=is_chunk, other=_NO_ID)
    row_top, token_id = _first_largest(values, ids)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    # Differences to such a logit are NaN, which a sort puts first, in order of ids;
    # those below infinity are as far as can be, and no NaN is likely enough for min-p.
    is_first = (row_top != row_top) | (row_top == float("-inf"))
    is_first |= (row_top == float("inf")) & (tl.load(min_ps + row) > 0)
    token_id = tl.where((temperature > 0) & is_first, 0, token_id)
    tl.store(outputs + row, token_id.to(tl.int64))
    tl.store(row_tops + row, row_top)
    # Down to which depth tokens are kept, and the last id kept at that.
    depth = vocab_size * 0 + _INFINITE_DEPTH
    last_id = vocab_size * 0 + _NO_ID
    has_top_k, has_top_p = (top_k > 0) & (top_k < vocab_size), top_p < 1
    is_open = (temperature > 0) & (tl.abs(row_top) < float("inf"))
    if is_open & (has_top_k | has_top_p):
        source = (
            logits + row * row_stride, banned_ids + row * num_banned,
            vocab_size, num_banned, row_top, temperature,
        )  # fmt: skip
        num_kept = tl.where(has_top_k, top_k, vocab_size).to(tl.float64)
        if has_top_k:
            depth, above = _search(num_kept, depth, source, True, CHUNK, PROBES)
            num_kept -= above
        if has_top_p:
            # Down to the last depth but one, and of the last what is kept.
            sums = _weigh_down_to(
                depth - 1 + tl.arange(0, 2), source,
                False, CHUNK, 2,
            )  # fmt: skip
            total = tl.min(sums, 0)
            total += tl.where(has_top_k, num_kept * _masses(depth), 0)
            deepest = depth
            depth, above = _search(
                top_p * total, deepest, source,
                False, CHUNK, PROBES,
            )  # fmt: skip
            goal, mass = top_p * total - above, _masses(depth)
            wanted = tl.maximum(tl.ceil(goal / mass), 1)
            # A quotient may round across a whole number that the sums meet exactly.
            wanted = tl.where((wanted - 1) * mass >= goal, wanted - 1, wanted)
            wanted = tl.where(wanted * mass < goal, wanted + 1, wanted)
            most = tl.where(depth == deepest, num_kept, vocab_size)
            num_kept = tl.minimum(tl.maximum(wanted, 1), most)
        last_id = _find_tie(depth, num_kept, source, CHUNK)
    tl.store(limits + row * 2, depth)
    tl.store(limits + row * 2 + 1, last_id)


@triton.jit(do_not_specialize=["num_banned"])
def _draw_kernel(
    logits, banned_ids, vocab_size, num_banned, row_stride, temperatures, min_ps, seeds,
    positions, row_tops, limits, noisy_tops, noisy_ids,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the largest scaled logit of a chunk with noise, of the tokens kept."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, row_top = tl.load(temperatures + row), tl.load(row_tops + row)
    if (temperature > 0) & (tl.abs(row_top) < float("inf")):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        source = (
            logits + row * row_stride, banned_ids + row * num_banned,
            vocab_size, num_banned, row_top, temperature,
        )  # fmt: skip
        scaled = _load_scaled(source, ids)
        depths, depth = _depths(scaled), tl.load(limits + row * 2)
        is_kept = depths < depth
        is_kept |= (depths == depth) & (ids <= tl.load(limits + row * 2 + 1))
        min_p = tl.load(min_ps + row)
        if min_p > 0:
            is_kept &= _masses(depths) >= min_p
        position = tl.load(positions + row)
        low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
        word, _, _, _ = tl.philox(tl.load(seeds + row), ids, low, high, high * 0)
        # The middle of one of 2^23 equal pieces of (0, 1).
        uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        noisy = scaled - tl.log(-tl.log(uniform))
        noisy = tl.where(is_kept & (ids < vocab_size), noisy, float("-inf"))
        top, top_id = _first_largest(noisy, ids)
        place = row * tl.num_programs(1) + chunk
        tl.store(noisy_tops + place, top)
        tl.store(noisy_ids + place, top_id)


@triton.jit
def _pick_kernel(
    temperatures, row_tops, noisy_tops, noisy_ids, outputs,
    NUM_CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the largest of all chunks of a row that is drawn at random."""
    row = tl.program_id(0).to(tl.int64)
    row_top = tl.load(row_tops + row)
    if (tl.load(temperatures + row) > 0) & (tl.abs(row_top) < float("inf")):
        chunks = tl.arange(0, CHUNKS_BLOCK)
        place, is_chunk = row * NUM_CHUNKS + chunks, chunks < NUM_CHUNKS
        values = tl.load(noisy_tops + place, mask=is_chunk, other=float("-inf"))
        ids = tl.load(noisy_ids + place, mask=is_chunk, other=_NO_ID)
        _, token_id = _first_largest(values, ids)
        tl.store(outputs + row, token_id.to(tl.int64))


@triton.jit
def _sum_kernel(logits, tops, totals, vocab_size, row_stride, CHUNK: tl.constexpr):
    """Add up the exponentials of a chunk, as shares of its largest."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    place = logits + row * row_stride + ids
    values = tl.load(place, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    top = tl.max(values, 0)
    # A chunk in which all tokens are forbidden has no share.
    shares = tl.where(values == float("-inf"), 0, tl.exp(values - top))
    place = row * tl.num_programs(1) + chunk
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(shares, 0))


@triton.jit
def _log_kernel(
    logits, tops, totals, outputs, vocab_size, row_stride,
    NUM_CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Bring a row's sums to their common largest, and take them from a chunk."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    place, is_chunk = row * NUM_CHUNKS + chunks, chunks < NUM_CHUNKS
    each_top = tl.load(tops + place, mask=is_chunk, other=float("-inf"))
    each_total = tl.load(totals + place, mask=is_chunk, other=0)
    top = tl.max(each_top, 0)
    fades = tl.where(each_total == 0, 0, tl.exp(each_top - top))
    total = tl.log(tl.sum(each_total * fades, 0))
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = logits + row * row_stride + ids
    values = tl.load(place, mask=ids < vocab_size).to(tl.float32)
    tl.store(outputs + row * vocab_size + ids, values - top - total, ids < vocab_size)
