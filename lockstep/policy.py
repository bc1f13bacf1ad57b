"""The rules that both schedulers obey: pure functions on integers.

Positions are absolute token positions, so that a rule reads the same in the first
slice of a prompt and in any later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lockstep.blocks import align_down
from lockstep.plan import BatchShape, CacheReport, SkipLimit

#: Prefill tokens of the smallest graph with a prompt in it.
LEAST_GRAPH_TOKENS = 16


def slice_end(start: int, length: int, budget: int, block_size: int) -> int:
    """Decide where a prefill slice that begins at ``start`` ends.

    A slice that cannot reach the end of the prompt stops at a block boundary if that
    still computes something: the state there can be stored, one elsewhere cannot.

    >>> slice_end(0, 100, 64, 16), slice_end(0, 100, 70, 16), slice_end(50, 100, 9, 16)
    (64, 64, 59)
    """
    end = min(length, start + budget)
    aligned = align_down(end, block_size)
    return aligned if start < aligned and end < length else end


def snapshot_points(
    start: int, end: int, length: int, branch: int, block_size: int
) -> list[int]:
    """List the positions in ``(start, end]`` whose state is worth a slot, best first.

    The last boundary of the prompt serves any longer prompt; the branch point (where
    this prompt left what was cached) serves the next sibling; the slice's own end
    serves a resumption; and the boundary before the last serves the same prompt again
    when it ends exactly on a block, since one token must always be computed.

    Args:
        start: First position computed.
        end: One past the last position computed.
        length: Tokens of the whole prompt.
        branch: Tokens whose blocks were matched.
        block_size: Tokens in a block.

    >>> snapshot_points(0, 64, 64, 32, 16)
    [64, 32, 48]
    """
    last = align_down(length, block_size)
    penultimate = align_down(length - 1, block_size)
    wanted = [last, branch, end, penultimate]
    points = [p for p in wanted if start < p <= end and p % block_size == 0]
    return list(dict.fromkeys(points))


def decide_skip(
    length: int,
    matched_kv: int,
    states: Collection[int],
    block_size: int,
    needs_state: bool,
    first_logits: int | None = None,
) -> CacheReport:
    """Decide how many leading tokens need not be computed, and say what set the limit.

    The skip is the largest position that leaves all to compute whose logits are wanted,
    at least the last token; whose K/V is all cached; and, in a model with state, at
    which a state is stored.

    Args:
        length: Tokens of the prompt.
        matched_kv: Leading tokens whose blocks are cached; a multiple of the block.
        states: Positions at or below ``matched_kv`` at which a state is stored.
        block_size: Tokens in a block.
        needs_state: Whether the model has Mamba layers.
        first_logits: First position after which logits are wanted; None for the last.

    >>> decide_skip(40, 32, [16], 16, needs_state=True).num_skipped_tokens
    16
    """
    deepest = max(states, default=0) if needs_state else matched_kv
    usable = [p for p in states if p < length] if needs_state else []
    if not needs_state:
        # Without a state to restore, any position will do, not only a boundary.
        usable = [min(matched_kv, length - 1)] if matched_kv else []
    skip = max(usable, default=0)
    limit, reason = _explain(length, matched_kv, deepest, skip, block_size)
    if first_logits is not None and first_logits < skip:
        within = [p for p in states if p <= first_logits] if needs_state else []
        possible, skip = skip, max(within, default=0) if needs_state else first_logits
        limit = SkipLimit.PROMPT_LOGPROBS
        reason = (
            f"{possible} of {length} tokens are known, but log-probabilities asked for "
            f"from position {first_logits + 1} on need the logits after position "
            f"{first_logits}; the next usable position is {skip}"
        )
    return CacheReport(
        matched_kv_tokens=matched_kv,
        matched_state_tokens=deepest,
        num_skipped_tokens=skip,
        limit=limit,
        reason=reason,
    )


def graph_shapes(
    max_requests: int, max_tokens: int, decode_only: bool = False
) -> tuple[BatchShape, ...]:
    """List the shapes to which steps are padded, ascending: every step fits one.

    Each count grows geometrically, so that their number grows with logarithms alone.
    Decode counts double in steps that only decode. With prompts, prefill tokens double
    and rows of either kind grow by a factor of four or eight: a padded row costs next
    to nothing there. That every step fits also means that admission need never wait
    for a shape.

    Args:
        max_requests: Rows of a step at most.
        max_tokens: Real tokens of a step at most.
        decode_only: Whether steps with prompts are left out.

    >>> [shape.tokens for shape in graph_shapes(4, 64, decode_only=True)]
    [1, 2, 4]
    """
    rows = min(max_requests, max_tokens)
    shapes = {BatchShape(count, 0, count) for count in _grow(1, rows, 2)}
    if not decode_only:
        shapes |= {
            BatchShape(tokens + decodes, prefills, decodes)
            for tokens in _grow(LEAST_GRAPH_TOKENS, max_tokens, 2)
            for prefills in _grow(1, rows, 4)
            for decodes in (0, *_grow(1, rows, 8))
            if prefills <= tokens
        }
    return tuple(sorted(shapes))


def host_shape(
    shape: BatchShape, graph_shapes: Sequence[BatchShape]
) -> BatchShape | None:
    """Find the smallest of some ascending shapes that has room for a step.

    >>> host_shape(BatchShape(21, 1, 3), graph_shapes(4, 64))
    BatchShape(tokens=36, prefill_requests=1, decode_requests=4)
    """
    for host in graph_shapes:
        if (
            host.decode_requests >= shape.decode_requests
            and host.prefill_requests >= shape.prefill_requests
            and host.prefill_tokens >= shape.prefill_tokens
        ):
            return host
    return None


def departure(
    prompt: Sequence[int], earlier: Sequence[int], earlier_prompt_length: int
) -> int | None:
    """Find where a prompt that repeats an earlier one leaves what that generated.

    Args:
        prompt: The new prompt.
        earlier: Prompt and generated tokens of an earlier request.
        earlier_prompt_length: How many of them were its prompt.

    >>> departure([1, 2, 3, 9], [1, 2, 3, 4, 5], 2)
    3
    >>> departure([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], 2) is None
    True
    """
    common = 0
    for new, old in zip(prompt, earlier, strict=False):
        if new != old:
            break
        common += 1
    departs = earlier_prompt_length <= common < min(len(prompt), len(earlier))
    return common if departs else None


def _grow(least: int, most: int, factor: int) -> Iterator[int]:
    """Count up geometrically, to ``most`` exactly."""
    while least < most:
        yield least
        least *= factor
    yield most


def _explain(
    length: int, matched_kv: int, deepest: int, skip: int, block_size: int
) -> tuple[SkipLimit, str]:
    if length <= block_size and not matched_kv:
        return SkipLimit.SHORT_PROMPT, (
            f"a prompt of {length} tokens has no full block of {block_size} before "
            "its last token"
        )
    if not matched_kv:
        return SkipLimit.NO_MATCH, "no block of this prompt is cached"
    if skip < deepest:
        return SkipLimit.LAST_TOKEN, (
            f"the cache holds {deepest} of {length} tokens, and at least one must be "
            f"computed; the next usable position is {skip}"
        )
    if not deepest:
        return SkipLimit.NO_STATE, (
            f"K/V of {matched_kv} tokens is cached, but no state at or before that"
        )
    if skip < matched_kv:
        return SkipLimit.STATE_DEPTH, (
            f"K/V of {matched_kv} tokens is cached, but the deepest stored state is "
            f"at {skip}"
        )
    return SkipLimit.ALL_MATCHED, (
        f"all {matched_kv} cached tokens were skipped; the next block is not cached"
    )
