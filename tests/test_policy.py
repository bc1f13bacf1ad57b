"""The rules and hashes that both sides share, against their definitions."""

from __future__ import annotations

import doctest
import hashlib
import itertools
import random
import struct

import pytest

from lockstep import blocks, policy
from lockstep.blocks import ROOT_HASH, BlockHash
from lockstep.plan import BatchShape, CacheReport, SkipLimit

SIZE = 4


@pytest.mark.parametrize("module", [blocks, policy])
def test_examples_are_right(module: object) -> None:
    """Those in the docstrings."""
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert found.attempted and not found.failed


def test_blocks_are_counted_and_aligned() -> None:
    """The fewest that hold so many tokens, and the last boundary before."""
    for size, count in itertools.product((1, 3, 4), range(30)):
        least = next(n for n in range(31) if n * size >= count)
        assert blocks.num_blocks_for(count, size) == least
        boundaries = [p for p in range(count + 1) if p % size == 0]
        assert blocks.align_down(count, size) == boundaries[-1]


def test_a_hash_is_that_of_parent_and_tokens() -> None:
    """SHA-256 over the parent and eight bytes for each token."""
    assert ROOT_HASH == b"\0" * 32
    data = ROOT_HASH + struct.pack("<3q", 1, 2**40, 3)
    expected = hashlib.sha256(data).digest()
    assert blocks.hash_block(ROOT_HASH, [1, 2**40, 3]) == expected


def test_hashes_are_extended_by_full_blocks() -> None:
    """Whatever was hashed before, each hash stands for all tokens up to its end."""
    tokens = list(range(3 * SIZE + 2))
    whole: list[BlockHash] = []
    blocks.extend_hashes(whole, tokens, SIZE)
    parent = ROOT_HASH
    for index in range(3):
        part = tokens[index * SIZE : (index + 1) * SIZE]
        parent = blocks.hash_block(parent, part)
        assert whole[index] == parent
    assert len(whole) == 3
    grown: list[BlockHash] = []
    for end in range(len(tokens) + 1):
        blocks.extend_hashes(grown, tokens[:end], SIZE)
        assert grown == whole[: end // SIZE]


def test_a_slice_ends_at_the_prompts_end_or_a_boundary() -> None:
    """Or, where it reaches neither, as far on as it can."""
    for start, length, budget in itertools.product(range(9), range(1, 20), range(1, 9)):
        if start >= length:
            continue
        reached = range(start + 1, min(length, start + budget) + 1)
        aligned = [end for end in reached if end % SIZE == 0]
        expected = (aligned or reached)[-1]
        if reached[-1] == length:
            expected = length
        assert policy.slice_end(start, length, budget, SIZE) == expected


def test_snapshots_are_wanted_where_someone_may_go_on() -> None:
    """The last boundary, the branch, the slice's end and the boundary before."""
    spaces = (range(14), range(15), range(1, 16), range(0, 16, SIZE))
    for start, end, length, branch in itertools.product(*spaces):
        if not start < end <= length or branch > length:
            continue
        wanted = [length // SIZE * SIZE, branch, end, (length - 1) // SIZE * SIZE]
        expected: list[int] = []
        for point in wanted:
            inside = start < point <= end and point % SIZE == 0
            if inside and point not in expected:
                expected.append(point)
        assert policy.snapshot_points(start, end, length, branch, SIZE) == expected


def _report(
    length: int,
    kv: int,
    states: list[int],
    needs_state: bool = True,
    first_logits: int | None = None,
) -> CacheReport:
    return policy.decide_skip(length, kv, states, SIZE, needs_state, first_logits)


@pytest.mark.parametrize("needs_state", [True, False])
def test_as_much_is_skipped_as_may_be(needs_state: bool) -> None:
    """Up to the last token, or the first whose logits are wanted."""
    source = random.Random(0)
    for length in range(1, 3 * SIZE + 2):
        for kv in range(0, length + 1, SIZE):
            points = range(SIZE, kv + 1, SIZE)
            states = [p for p in points if needs_state and source.random() < 0.6]
            for first in (None, *range(length)):
                last = length - 1 if first is None else min(first, length - 1)
                possible = [0, *states] if needs_state else range(kv + 1)
                expected = max(p for p in possible if p <= last)
                report = _report(length, kv, states, needs_state, first)
                assert report.num_skipped_tokens == expected
                assert report.matched_kv_tokens == kv
                deepest = max([0, *states]) if needs_state else kv
                assert report.matched_state_tokens == deepest
                unasked = _report(length, kv, states, needs_state)
                is_less = expected < unasked.num_skipped_tokens
                assert (report.limit is SkipLimit.PROMPT_LOGPROBS) is is_less
                assert is_less or report == unasked


@pytest.mark.parametrize(
    ("length", "kv", "states", "needs_state", "limit", "reason"),
    [
        (
            *(4, 0, [], True, SkipLimit.SHORT_PROMPT),
            "a prompt of 4 tokens has no full block of 4 before its last token",
        ),
        (5, 0, [], True, SkipLimit.NO_MATCH, "no block of this prompt is cached"),
        (
            *(8, 8, [4, 8], True, SkipLimit.LAST_TOKEN),
            "the cache holds 8 of 8 tokens, and at least one must be computed; the "
            "next usable position is 4",
        ),
        (
            *(4, 4, [], False, SkipLimit.LAST_TOKEN),
            "the cache holds 4 of 4 tokens, and at least one must be computed; the "
            "next usable position is 3",
        ),
        (
            *(9, 8, [], True, SkipLimit.NO_STATE),
            "K/V of 8 tokens is cached, but no state at or before that",
        ),
        (
            *(9, 8, [4], True, SkipLimit.STATE_DEPTH),
            "K/V of 8 tokens is cached, but the deepest stored state is at 4",
        ),
        (
            *(9, 8, [8], True, SkipLimit.ALL_MATCHED),
            "all 8 cached tokens were skipped; the next block is not cached",
        ),
        (
            *(9, 8, [], False, SkipLimit.ALL_MATCHED),
            "all 8 cached tokens were skipped; the next block is not cached",
        ),
    ],
)
def test_what_limits_a_skip_is_said(
    length: int,
    kv: int,
    states: list[int],
    needs_state: bool,
    limit: SkipLimit,
    reason: str,
) -> None:
    """With the numbers."""
    report = _report(length, kv, states, needs_state)
    assert (report.limit, report.reason) == (limit, reason)


def test_wanted_logits_limit_a_skip() -> None:
    """With the numbers, too."""
    report = _report(9, 8, [4, 8], True, 5)
    assert report.limit is SkipLimit.PROMPT_LOGPROBS
    assert report.reason == (
        "8 of 9 tokens are known, but log-probabilities asked for from position 6 on "
        "need the logits after position 5; the next usable position is 4"
    )


def test_a_departure_is_where_a_repeated_prompt_goes_its_own_way() -> None:
    """Only within what was generated, and only where both go on."""
    tokens = [
        list(each) for n in range(1, 5) for each in itertools.product((0, 1), repeat=n)
    ]
    for prompt, earlier in itertools.product(tokens, tokens):
        lengths = range(min(len(prompt), len(earlier)) + 1)
        common = max(n for n in lengths if prompt[:n] == earlier[:n])
        for length in range(1, len(earlier) + 1):
            goes_on = common < len(prompt) and common < len(earlier)
            expected = common if goes_on and common >= length else None
            assert policy.departure(prompt, earlier, length) == expected


def has_room(host: BatchShape, shape: BatchShape) -> bool:
    """Tell whether a step fits a padded shape, kind by kind."""
    return (
        host.decode_requests >= shape.decode_requests
        and host.prefill_requests >= shape.prefill_requests
        and host.tokens - host.decode_requests >= shape.tokens - shape.decode_requests
    )


def steps_of(max_requests: int, max_tokens: int) -> list[BatchShape]:
    """List every shape that a step can have."""
    return [
        BatchShape(tokens, prefills, decodes)
        for decodes in range(max_requests + 1)
        for prefills in range(max_requests + 1 - decodes)
        for tokens in range(decodes + prefills, max_tokens + 1)
        if (decodes or prefills) and (prefills or tokens == decodes)
    ]


@pytest.mark.parametrize(("max_requests", "max_tokens"), [(1, 1), (5, 40), (9, 7)])
def test_every_step_fits_the_smallest_shape_with_room(
    max_requests: int, max_tokens: int
) -> None:
    """And those that only decode need no others."""
    shapes = policy.graph_shapes(max_requests, max_tokens)
    decodes = policy.graph_shapes(max_requests, max_tokens, decode_only=True)
    assert set(decodes) == {shape for shape in shapes if not shape.prefill_requests}
    for step in steps_of(max_requests, max_tokens):
        host = policy.host_shape(step, shapes)
        assert host == min(shape for shape in shapes if has_room(shape, step))
        if step.prefill_requests:
            assert policy.host_shape(step, decodes) is None


def test_shapes_grow_geometrically() -> None:
    """Rows of prompts by four, other rows beside them by eight, the rest by two."""
    shapes = policy.graph_shapes(70, 100)
    assert list(shapes) == sorted(set(shapes))
    only_decode = [shape for shape in shapes if not shape.prefill_requests]
    assert only_decode == [
        BatchShape(count, 0, count) for count in (1, 2, 4, 8, 16, 32, 64, 70)
    ]
    mixed = {
        BatchShape(tokens + decodes, prefills, decodes)
        for tokens in (16, 32, 64, 100)
        for prefills in (1, 4, 16, 64, 70)
        for decodes in (0, 1, 8, 64, 70)
        if prefills <= tokens
    }
    assert set(shapes) == mixed | set(only_decode)
