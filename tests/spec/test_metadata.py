"""Metadata: where each token stands, what it may touch, where states are known."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batch import BatchMetadata
from lockstep.config import Sizes
from lockstep.plan import BatchShape, RowPlan
from lockstep.request import Request, SamplingParams
from tests.plans import Slice, Step, build, make_sizes, make_step, steps

SIZES = [make_sizes(16), make_sizes(16, blocks=3), make_sizes(32, blocks=2)]


class Token(NamedTuple):
    """A token of a batch as the plan has it."""

    row: RowPlan
    request: Request
    position: int


def tokens_of(step: Step) -> list[Token]:
    """List all tokens in batch order."""
    plan, requests = step
    rows = plan.decode_rows + plan.prefill_rows
    return [
        Token(row, requests[row.request_id], position)
        for row in rows
        for position in range(row.start, row.end)
    ]


def test_a_worked_example(side: str) -> None:
    """A decode row and two slices, the second resumed off a boundary; blocks of 16."""
    sizes = make_sizes(16)
    plan, requests = make_step(
        sizes,
        [Slice(31, 32, snapshots=[32])],
        [Slice(0, 20, rest=9, snapshots=[16]), Slice(40, 66, snapshots=[48, 64])],
    )
    batch = build(side, sizes, (plan, requests), all_logits=False)
    assert batch.shape == batch.padded_shape == BatchShape(47, 2, 1)
    assert batch.context_lens.tolist() == [32, 20, 66]
    assert batch.cu_prefill_lens.tolist() == [0, 20, 46]
    assert batch.prefill_starts.tolist() == [0, 40]
    assert batch.cu_scan_chunks.tolist() == [0, 16, 20, 28, 44, 46]
    assert batch.scan_chunk_rows.tolist() == [0, 0, 1, 1, 1]
    assert batch.last_scan_chunks.tolist() == [1, 4]
    assert batch.num_snapshots == 3
    assert batch.snapshot_rows.tolist() == [0, 1, 1]
    assert batch.snapshot_ends.tolist() == [16, 28, 44]
    assert batch.snapshot_scan_chunks.tolist() == [0, 2, 3]
    assert batch.logit_index.tolist() == [0, 46]
    assert batch.draws.positions.tolist() == [32, 66]
    (stored,) = plan.rows[0].snapshots
    assert batch.decode_snapshot_slot_ids.tolist() == [stored.slot_id]


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_tokens_stand_in_order(side: str, sizes: Sizes, data: st.DataObject) -> None:
    """Decode rows first, each row's tokens together, with id and absolute position."""
    step = data.draw(steps(sizes))
    batch, tokens = build(side, sizes, step, False), tokens_of(step)
    assert batch.token_mask.tolist() == [True] * len(tokens)
    assert batch.positions.tolist() == [token.position for token in tokens]
    ids = [token.request.token_ids[token.position] for token in tokens]
    assert batch.token_ids.tolist() == ids
    assert batch.num_decode_tokens == len(step[0].decode_rows)


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_shared_blocks_are_never_written(
    side: str, sizes: Sizes, data: st.DataObject
) -> None:
    """A token's K/V goes to its place in its block, or to the dummy block."""
    step = data.draw(steps(sizes))
    index = build(side, sizes, step, False).kv_index.tolist()
    for (row, _, position), place in zip(tokens_of(step), index, strict=True):
        block, offset = divmod(place, sizes.block_size)
        assert offset == position % sizes.block_size
        shared = row.block_table[: row.num_shared_blocks]
        own = row.block_table[position // sizes.block_size]
        assert block == (sizes.dummy_block if own in shared else own)


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_tables_reach_as_far_as_contexts(
    side: str, sizes: Sizes, data: st.DataObject
) -> None:
    """Each row reads its blocks, in order; behind them only the dummy block stands."""
    plan, _ = step = data.draw(steps(sizes))
    batch = build(side, sizes, step, False)
    rows = plan.decode_rows + plan.prefill_rows
    assert batch.context_lens.tolist() == [row.end for row in rows]
    for row, table in zip(rows, batch.block_tables.tolist(), strict=True):
        count = len(row.block_table)
        assert table[:count] == row.block_table
        assert set(table[count:]) <= {sizes.dummy_block}


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_rows_name_their_slots(side: str, sizes: Sizes, data: st.DataObject) -> None:
    """Live slots, initial slots and targets are those of the plan, row by row."""
    plan, _ = step = data.draw(steps(sizes))
    batch = build(side, sizes, step, False)
    decodes, prefills = plan.decode_rows, plan.prefill_rows
    assert batch.decode_slot_ids.tolist() == [row.slot_id for row in decodes]
    assert batch.prefill_slot_ids.tolist() == [row.slot_id for row in prefills]
    initial = [row.initial_slot_id for row in prefills]
    assert batch.initial_slot_ids.tolist() == initial
    for row, target in zip(decodes, batch.decode_snapshot_slot_ids, strict=True):
        stored = [snapshot.slot_id for snapshot in row.snapshots]
        assert [int(target)] == (stored or [sizes.dummy_slot])


def chunk_positions(batch: BatchMetadata) -> list[tuple[int, int, int]]:
    """List row, first and last absolute position of each scan chunk."""
    offsets, starts = batch.cu_prefill_lens.tolist(), batch.prefill_starts.tolist()
    bounds = pairwise(batch.cu_scan_chunks.tolist())
    return [
        (row, *(starts[row] + bound - offsets[row] for bound in pair))
        for row, pair in zip(batch.scan_chunk_rows.tolist(), bounds, strict=True)
    ]


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_chunks_are_cut_at_absolute_multiples(
    side: str, sizes: Sizes, data: st.DataObject
) -> None:
    """Chunks cover each row, end at row ends or at multiples, and nowhere else."""
    plan, _ = step = data.draw(steps(sizes))
    batch, size = build(side, sizes, step, False), sizes.scan_chunk_size
    expected = [
        (index, max(row.start, first), min(row.end, first + size))
        for index, row in enumerate(plan.prefill_rows)
        for first in range(row.start // size * size, row.end, size)
    ]
    assert chunk_positions(batch) == expected
    prefilled = plan.shape.tokens - plan.shape.decode_requests
    assert len(expected) <= prefilled // size + 2 * plan.shape.prefill_requests
    last = [expected[index][::2] for index in batch.last_scan_chunks.tolist()]
    assert last == [(index, row.end) for index, row in enumerate(plan.prefill_rows)]


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_states_are_known_where_they_are_stored(
    side: str, sizes: Sizes, data: st.DataObject
) -> None:
    """A chunk of the right row ends exactly after the last token of a stored state."""
    plan, _ = step = data.draw(steps(sizes))
    batch = build(side, sizes, step, False)
    wanted = [
        (index, snapshot.position, snapshot.slot_id)
        for index, row in enumerate(plan.prefill_rows)
        for snapshot in row.snapshots
    ]
    assert batch.num_snapshots == len(wanted)
    assert batch.snapshot_slot_ids.tolist() == [slot for *_, slot in wanted]
    assert batch.snapshot_rows.tolist() == [row for row, *_ in wanted]
    chunks = chunk_positions(batch)
    ends = batch.cu_scan_chunks[1:].tolist()
    for index, (row, position, _) in enumerate(wanted):
        chunk = int(batch.snapshot_scan_chunks[index])
        assert chunks[chunk][::2] == (row, position)
        assert ends[chunk] == int(batch.snapshot_ends[index])


def reports_next(token: Token) -> bool:
    """Tell whether the prompt token behind this one is to be reported."""
    sampling, behind = token.request.sampling, token.position + 1
    return (
        sampling.prompt_logprobs is not None
        and sampling.prompt_logprobs_from <= behind
        and behind < len(token.request.prompt_token_ids)
    )


def banned_for(token: Token) -> list[int]:
    """List the tokens that end a request which is still too short to end."""
    request = token.request
    generated = len(request.token_ids) - len(request.prompt_token_ids)
    ends = [*request.eos_token_ids, *request.sampling.stop_token_ids]
    return ends if generated < request.sampling.min_tokens else []


@pytest.mark.parametrize("all_logits", [False, True])
@given(data=st.data())
def test_draws_follow_the_last_tokens(
    side: str, all_logits: bool, data: st.DataObject
) -> None:
    """Rows that reach their end draw, from the logits of that token; no others do.

    Logits of a prompt's other tokens are wanted where the next one is to be reported.
    """
    sizes = SIZES[0]
    step = data.draw(steps(sizes))
    batch, tokens = build(side, sizes, step, all_logits), tokens_of(step)
    drawing = [
        index
        for index, token in enumerate(tokens)
        if token.row.samples and token.position == token.row.end - 1
    ]
    wanted = [
        index
        for index, token in enumerate(tokens)
        if all_logits or index in drawing or reports_next(token)
    ]
    assert batch.logit_index.tolist() == wanted
    assert batch.logit_index[batch.sample_index].tolist() == drawing
    positions = [tokens[index].position + 1 for index in drawing]
    draws, drawn = batch.draws, [tokens[index] for index in drawing]
    assert draws.positions.tolist() == positions
    sampling = [token.request.sampling for token in drawn]
    assert draws.seeds.tolist() == [each.seed or 0 for each in sampling]
    assert draws.top_ks.tolist() == [each.top_k or 0 for each in sampling]
    assert draws.top_ps.tolist() == [each.top_p for each in sampling]
    assert draws.min_ps.tolist() == [each.min_p for each in sampling]
    temperatures = torch.tensor([each.temperature for each in sampling])
    assert torch.equal(draws.temperatures, temperatures)
    for token, ids in zip(drawn, draws.banned_ids.tolist(), strict=True):
        assert [each for each in ids if each != -1] == banned_for(token)


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1])
def test_seeds_of_any_size(side: str, seed: int | None) -> None:
    """The largest seed arrives whole."""
    row = Slice(0, 3, sampling=SamplingParams(seed=seed))
    batch = build(side, SIZES[0], make_step(SIZES[0], [], [row]), all_logits=False)
    assert batch.draws.seeds.tolist() == [seed or 0]


def test_a_step_of_one_kind(side: str) -> None:
    """Decode rows alone have no scan chunks; prefill rows alone no decode tokens."""
    sizes = SIZES[0]
    batch = build(side, sizes, make_step(sizes, [Slice(3, 4)] * 2, []), False)
    assert batch.cu_prefill_lens.tolist() == batch.cu_scan_chunks.tolist() == [0]
    assert len(batch.scan_chunk_rows) == len(batch.last_scan_chunks) == 0
    batch = build(side, sizes, make_step(sizes, [], [Slice(0, 4, rest=1)]), False)
    assert batch.num_decode_tokens == len(batch.decode_slot_ids) == 0
    assert len(batch.logit_index) == len(batch.sample_index) == 0
