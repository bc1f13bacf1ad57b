"""Draws of each row by what it wants, without asking on the host what that is.

Rows are cut into chunks of the vocabulary, so that one row too fills the device; the
best of the chunks are compared in a launch of its own. A greedy row is read once. A
random one is read again, with noise. Only a row with top-k or top-p has a threshold
searched; programs of other rows return at once.

The search does not sort. Scaled logits are at most 0, and the bits of a float without
its sign are ordered as its absolute value is: a *depth*. Each launch narrows down the
least depth down to which tokens count or weigh enough, by as many probes at once as
make eight launches enough. Of tokens at that very depth, which are equal, the lowest
ids stay. So a row keeps the tokens that it keeps on the other side: counts are whole
numbers, and shares are added in float64, whose rounding hardly ever decides. Quotients,
noise and shares are the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.batch import Draws
from lockstep.shapes import Logits, PerRow

from .exact import exact_divide

#: Tokens that a program looks at, and that a search looks at, at a time.
_CHUNK = 2048
_SEARCHED = 256
#: Depths that are probed at once, and launches that then find any one of 2^31.
_PROBES = 16
_TURNS = 8
#: Programs of a search that fill the device, and the most that share a row.
_PROGRAMS = 1024
_MAX_PARTS = 64

_INFINITE_DEPTH = tl.constexpr(0x7F800000)
_NO_ID = tl.constexpr(2**31 - 1)


def sample(logits: Logits, draws: Draws) -> PerRow:
    """Draw all rows.

    Cost: 23 launches, but a greedy row reads its logits in one of them, a random one in
    two; each filter that needs sums reads them eight times more.
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
    ties = logits.new_empty(shape[1:], dtype=torch.int32)
    num_parts = max(1, min(_MAX_PARTS, num_chunks, _PROGRAMS // num_rows))
    num_parts = 1 << num_parts.bit_length() - 1
    limits = logits.new_empty(num_rows, 2, dtype=torch.float64)
    states = logits.new_empty(2, num_rows, 4, dtype=torch.float64)
    sums = logits.new_empty(2, num_rows, num_parts, _PROBES, dtype=torch.float64)
    assert logits.stride(1) == 1
    banned_ids = draws.banned_ids.contiguous()
    rows = logits, banned_ids, vocab_size, banned_ids.shape[1], logits.stride(0)
    filters = draws.temperatures, draws.top_ks, draws.top_ps, row_tops, limits
    chunks_block = triton.next_power_of_2(num_chunks)
    every_chunk = (num_rows, num_chunks)
    _top_kernel[every_chunk](*rows, tops, ids, CHUNK=chunk)
    _settle_kernel[(num_rows,)](
        *filters, draws.min_ps, tops, ids, outputs, vocab_size,
        NUM_CHUNKS=num_chunks, CHUNKS_BLOCK=chunks_block,
    )  # fmt: skip
    for is_count in (True, False):
        for turn in range(_TURNS + 1):
            _search_kernel[(num_rows, num_parts if turn < _TURNS else 1)](
                *rows, *filters, states, sums, num_rows, turn,
                IS_COUNT=is_count, PARTS=num_parts, CHUNK=_SEARCHED, PROBES=_PROBES,
                TURNS=_TURNS, num_warps=8,
            )  # fmt: skip
    _tie_kernel[every_chunk](*rows, *filters, ties, CHUNK=chunk)
    _draw_kernel[every_chunk](
        *rows, *filters, draws.min_ps, draws.seeds, draws.positions, ties, noisy_tops,
        noisy_ids,
        CHUNK=chunk, CHUNKS_BLOCK=chunks_block, enable_fp_fusion=False,
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
def _is_drawn(row, temperatures, row_tops):
    """Tell whether a row is random, and has logits to compare."""
    is_finite = tl.abs(tl.load(row_tops + row)) < float("inf")
    return (tl.load(temperatures + row) > 0) & is_finite


@triton.jit
def _settle_kernel(
    temperatures, top_ks, top_ps, row_tops, limits, min_ps, tops, top_ids, outputs,
    vocab_size,
    NUM_CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Find a row's largest logit, and begin with all that top-k leaves, or all.

    A row is done if it is greedy, or if its largest logit is no finite number.
    """
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    place, is_chunk = row * NUM_CHUNKS + chunks, chunks < NUM_CHUNKS
    values = tl.load(tops + place, mask=is_chunk, other=float("-inf"))
    ids = tl.load(top_ids + place, mask=is_chunk, other=_NO_ID)
    row_top, token_id = _first_largest(values, ids)
    # Differences to such a logit are NaN, which a sort puts first, in order of ids;
    # those below infinity are as far as can be, and no NaN is likely enough for min-p.
    is_first = (row_top != row_top) | (row_top == float("-inf"))
    is_first |= (row_top == float("inf")) & (tl.load(min_ps + row) > 0)
    token_id = tl.where((tl.load(temperatures + row) > 0) & is_first, 0, token_id)
    tl.store(outputs + row, token_id.to(tl.int64))
    tl.store(row_tops + row, row_top)
    top_k = tl.load(top_ks + row)
    num_kept = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    tl.store(limits + row * 2, _INFINITE_DEPTH)
    tl.store(limits + row * 2 + 1, num_kept.to(tl.float64))


@triton.jit
def _probe(least, enough, PROBES: tl.constexpr):
    """Return depths between two others, the last one next to the deeper."""
    step = tl.cdiv(enough - least - 1, PROBES)
    return tl.minimum(least + step * (1 + tl.arange(0, PROBES)), enough - 1)


@triton.jit
def _narrow(
    row, turn, top_p, limits, states, sums, num_rows,
    IS_COUNT: tl.constexpr, PARTS: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Return between which depths the goal is reached, what is above, and the goal.

    Down to the deeper one, tokens reach it; down to the other they do not.
    """
    deepest = tl.load(limits + row * 2).to(tl.int32)
    num_kept = tl.load(limits + row * 2 + 1)
    least, enough, above, goal = deepest * 0 - 1, deepest, num_kept * 0, num_kept
    if turn > 0:
        row += (turn + 1) % 2 * num_rows
        least = tl.load(states + row * 4).to(tl.int32)
        enough = tl.load(states + row * 4 + 1).to(tl.int32)
        above, goal = tl.load(states + row * 4 + 2), tl.load(states + row * 4 + 3)
        parts, probes = tl.arange(0, PARTS)[:, None], tl.arange(0, PROBES)[None, :]
        found = tl.load(sums + (row * PARTS + parts) * PROBES + probes)
        found, probes = tl.sum(found, 0), _probe(least, enough, PROBES)
        # Nothing was probed where there is nothing between.
        is_probed = (probes > least) & (probes < enough)
        if not IS_COUNT:
            # Of the deepest tokens, only those that top-k leaves have a share.
            total = tl.max(tl.where(is_probed, found, 0), 0)
            total += num_kept * _masses(deepest)
            goal = tl.where(turn == 1, top_p * total, goal)
        is_enough = is_probed & (found >= goal)
        is_less = is_probed & (found < goal)
        enough = tl.min(tl.where(is_enough, probes, enough), 0)
        least = tl.max(tl.where(is_less, probes, least), 0)
        above = tl.max(tl.where(is_less, found, above), 0)
    return least, enough, above, goal


@triton.jit(do_not_specialize=["num_banned", "num_rows", "turn"])
def _search_kernel(
    logits, banned_ids, vocab_size, num_banned, row_stride, temperatures, top_ks,
    top_ps, row_tops, limits, states, sums, num_rows, turn,
    IS_COUNT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    PROBES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Count or weigh the tokens of a part of a row down to some depths, in float64.

    What all parts found in the turn before settles which depths; after the last turn,
    what is kept.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    is_wanted = ((top_k > 0) & (top_k < vocab_size)) if IS_COUNT else top_p < 1
    if is_wanted & _is_drawn(row, temperatures, row_tops):
        least, enough, above, goal = _narrow(
            row, turn, top_p, limits, states, sums, num_rows, IS_COUNT, PARTS, PROBES
        )
        if turn == TURNS:
            deepest = tl.load(limits + row * 2).to(tl.int32)
            num_kept = tl.load(limits + row * 2 + 1)
            if IS_COUNT:
                num_kept -= above
            else:
                goal, mass = goal - above, _masses(enough)
                wanted = tl.maximum(tl.ceil(goal / mass), 1)
                # A quotient may round across a whole number that sums meet exactly.
                wanted = tl.where((wanted - 1) * mass >= goal, wanted - 1, wanted)
                wanted = tl.where(wanted * mass < goal, wanted + 1, wanted)
                most = tl.where(enough == deepest, num_kept, vocab_size)
                num_kept = tl.minimum(tl.maximum(wanted, 1), most)
            tl.store(limits + row * 2, enough.to(tl.float64))
            tl.store(limits + row * 2 + 1, num_kept)
        else:
            place = turn % 2 * num_rows + row
            if part == 0:
                tl.store(states + place * 4, least.to(tl.float64))
                tl.store(states + place * 4 + 1, enough.to(tl.float64))
                tl.store(states + place * 4 + 2, above)
                tl.store(states + place * 4 + 3, goal)
            if enough - least > 1:
                source = (
                    logits + row * row_stride, banned_ids + row * num_banned,
                    vocab_size, num_banned, tl.load(row_tops + row),
                    tl.load(temperatures + row),
                )  # fmt: skip
                probes = _probe(least, enough, PROBES)
                found = tl.zeros([CHUNK, PROBES], tl.float64)
                for first in range(part * CHUNK, vocab_size, PARTS * CHUNK):
                    ids = first + tl.arange(0, CHUNK)
                    depths = _depths(_load_scaled(source, ids))
                    if IS_COUNT:
                        weights = tl.full([CHUNK], 1, tl.float64)
                    else:
                        weights = _masses(depths)
                    # Ids past the last are as deep as forbidden tokens, but are none.
                    weights = tl.where(ids < vocab_size, weights, 0)
                    is_above = depths[:, None] <= probes[None, :]
                    found += tl.where(is_above, weights[:, None], 0)
                target = sums + (place * PARTS + part) * PROBES + tl.arange(0, PROBES)
                tl.store(target, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_banned"])
def _tie_kernel(
    logits, banned_ids, vocab_size, num_banned, row_stride, temperatures, top_ks,
    top_ps, row_tops, limits, ties,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the tokens of a chunk at the last depth that is kept, if one is."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    depth = tl.load(limits + row * 2).to(tl.int32)
    if (depth < _INFINITE_DEPTH) & _is_drawn(row, temperatures, row_tops):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        source = (
            logits + row * row_stride, banned_ids + row * num_banned, vocab_size,
            num_banned, tl.load(row_tops + row), tl.load(temperatures + row),
        )  # fmt: skip
        is_tie = (_depths(_load_scaled(source, ids)) == depth) & (ids < vocab_size)
        tl.store(ties + row * tl.num_programs(1) + chunk, tl.sum(is_tie.to(tl.int32)))


@triton.jit(do_not_specialize=["num_banned"])
def _draw_kernel(
    logits, banned_ids, vocab_size, num_banned, row_stride, temperatures, top_ks,
    top_ps, row_tops, limits, min_ps, seeds, positions, ties, noisy_tops, noisy_ids,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the largest scaled logit of a chunk with noise, of the tokens kept."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_drawn(row, temperatures, row_tops):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        source = (
            logits + row * row_stride, banned_ids + row * num_banned, vocab_size,
            num_banned, tl.load(row_tops + row), tl.load(temperatures + row),
        )  # fmt: skip
        scaled = _load_scaled(source, ids)
        depths, depth = _depths(scaled), tl.load(limits + row * 2).to(tl.int32)
        is_kept = (depths <= depth) & (ids < vocab_size)
        if depth < _INFINITE_DEPTH:
            # The first ones of equal tokens, counted from the row's first chunk.
            chunks = tl.arange(0, CHUNKS_BLOCK)
            before = tl.load(
                ties + row * tl.num_programs(1) + chunks, mask=chunks < chunk, other=0
            )
            rank = tl.sum(before, 0) + tl.cumsum((depths == depth).to(tl.int32), 0)
            num_kept = tl.load(limits + row * 2 + 1)
            is_kept &= (depths < depth) | (rank <= num_kept)
        min_p = tl.load(min_ps + row)
        if min_p > 0:
            is_kept &= _masses(depths) >= min_p
        position = tl.load(positions + row)
        low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
        word, _, _, _ = tl.philox(tl.load(seeds + row), ids, low, high, high * 0)
        # The middle of one of 2^23 equal pieces of (0, 1).
        uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        noisy = tl.where(is_kept, scaled - tl.log(-tl.log(uniform)), float("-inf"))
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
    if _is_drawn(row, temperatures, row_tops):
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
