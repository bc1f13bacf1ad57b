"""Metadata against its twin: every array of every step, number by number."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.batch import BatchMetadata, Draws
from lockstep.config import Sizes
from lockstep.plan import BatchShape, StepPlan
from lockstep.policy import graph_shapes, host_shape
from lockstep.request import SamplingParams
from tests.conftest import SIDES
from tests.factories import load
from tests.plans import (
    Padding,
    Slice,
    Step,
    boundaries,
    build,
    build_padded,
    edge_lengths,
    make_sizes,
    make_step,
    paddings,
    steps,
)
from tests.tolerances import assert_equal

SIZES = [make_sizes(16), make_sizes(16, blocks=3), make_sizes(32, blocks=2)]
CHUNKS = (16, 32, 64, 128, 256)


def entries(batch: BatchMetadata) -> dict[str, Any]:
    """Return all fields by name, those of its draws among them."""
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    draws: Draws = found.pop("draws")
    return found | {f"draws.{name}": each for name, each in draws._asdict().items()}


def assert_same_batch(actual: BatchMetadata, expected: BatchMetadata) -> None:
    """Compare every field: dtypes, shapes, values."""
    others = entries(actual)
    for name, theirs in entries(expected).items():
        if isinstance(theirs, Tensor):
            assert_equal(others[name], theirs)
        else:
            assert others[name] == theirs, name


def assert_twins(sizes: Sizes, step: Step) -> None:
    """Compare both sides, with all logits and without."""
    for all_logits in (False, True):
        first, second = [build(side, sizes, step, all_logits) for side in SIDES]
        assert_same_batch(second, first)


@pytest.mark.parametrize("sizes", SIZES)
@given(data=st.data())
def test_any_step(sizes: Sizes, data: st.DataObject) -> None:
    """Decode, prefill and mixed steps with shared blocks and stored states."""
    assert_twins(sizes, data.draw(steps(sizes)))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    ("chunks", "offset"), [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (5, 7)]
)
def test_edge_slices(chunk: int, chunks: int, offset: int) -> None:
    """Every edge length from every kind of start, states stored wherever possible."""
    sizes = make_sizes(chunk)
    start = chunks * chunk + offset
    pieces = [Slice(start, start + length) for length in edge_lengths(sizes)]
    for piece in pieces:
        piece.snapshots = boundaries(piece, sizes)
        assert_twins(sizes, make_step(sizes, [], [piece]))
    assert_twins(sizes, make_step(sizes, [Slice(9, 10)], pieces))


def test_one_row_of_either_kind() -> None:
    """The smallest steps."""
    sizes = SIZES[0]
    assert_twins(sizes, make_step(sizes, [Slice(0, 1)], []))
    assert_twins(sizes, make_step(sizes, [], [Slice(0, 1)]))
    assert_twins(sizes, make_step(sizes, [], [Slice(0, 5, rest=20)]))


def test_steps_do_not_share_memory() -> None:
    """The arrays of a step stay as they are when the next one is made."""
    sizes = SIZES[0]
    builder = load("optimized", "metadata").MetadataBuilder(
        sizes, torch.get_default_device()
    )
    plan, requests = make_step(sizes, [Slice(7, 8)], [Slice(0, 40, snapshots=[32])])
    first = builder.build(plan, requests, False)
    builder.build(*make_step(sizes, [Slice(70, 71)], [Slice(3, 90)]), True)
    assert_same_batch(first, builder.build(plan, requests, False))


def test_one_copy_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many arrays there are, one transfer carries them."""
    copies: list[int] = []
    original = torch.Tensor.to

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        copies.append(tensor.numel())
        return original(tensor, *args, **kwargs)  # type: ignore[arg-type]

    step = make_step(SIZES[0], [Slice(7, 8)], [Slice(0, 40)])
    monkeypatch.setattr(torch.Tensor, "to", counted)
    build("optimized", SIZES[0], step, all_logits=False)
    assert len(copies) == 1


def test_order_of_rows_is_the_plans() -> None:
    """Rows come in the plan's order within their kind, also when kinds are mixed."""
    sizes = SIZES[0]
    plan, requests = make_step(
        sizes, [Slice(7, 8), Slice(4, 5)], [Slice(0, 40), Slice(16, 20)]
    )
    mixed = StepPlan(rows=[plan.rows[i] for i in (2, 1, 3, 0)])
    assert_twins(sizes, (mixed, requests))


# Padding, which a later engine turns on.


#: Arrays that hold something of each token, and of each row, of either kind.
BY_TOKEN = ("token_ids", "positions", "token_mask", "kv_index")
BY_ROW = ("block_tables", "context_lens")


@given(data=st.data(), padding=paddings())
def test_padding_moves_nothing(data: st.DataObject, padding: Padding) -> None:
    """Longer arrays hold the same numbers, in the places that the shape gives them."""
    sizes = SIZES[0]
    step = data.draw(steps(sizes))
    real = build("reference", sizes, step, all_logits=False)
    padded = build_padded(sizes, step, padding)
    assert padded.shape == real.shape
    decodes, gap = real.num_decode_tokens, padded.num_decode_tokens
    longer = entries(padded)
    for name, theirs in entries(real).items():
        mine = longer[name]
        if not isinstance(theirs, torch.Tensor):
            assert name == "padded_shape" or mine == theirs
            continue
        if theirs.ndim == 2:
            mine = mine[:, : theirs.shape[1]]
        if name in BY_TOKEN + BY_ROW:
            assert_equal(mine[:decodes], theirs[:decodes])
            mine, theirs = mine[gap:], theirs[decodes:]
        if name == "logit_index":
            theirs = theirs + (gap - decodes) * (theirs >= decodes)
        assert_equal(mine[: len(theirs)], theirs)


@given(data=st.data(), padding=paddings())
def test_padding_harms_nobody(data: st.DataObject, padding: Padding) -> None:
    """What is not real names dummies, has no length, and lies in range."""
    sizes = SIZES[0]
    batch = build_padded(sizes, data.draw(steps(sizes)), padding)
    real, size = batch.shape, batch.padded_shape
    is_real = batch.token_mask
    assert int(is_real.sum()) == real.tokens
    assert not batch.draws.temperatures[batch.num_samples :].any()
    assert (batch.draws.banned_ids[batch.num_samples :] == -1).all()
    dummy_place = sizes.dummy_block * sizes.block_size
    assert (batch.kv_index[~is_real] == dummy_place).all()
    assert (batch.decode_slot_ids[real.decode_requests :] == sizes.dummy_slot).all()
    assert (batch.prefill_slot_ids[real.prefill_requests :] == sizes.dummy_slot).all()
    assert (batch.initial_slot_ids[real.prefill_requests :] == sizes.zero_slot).all()
    assert (batch.snapshot_slot_ids[batch.num_snapshots :] == sizes.dummy_slot).all()
    is_row = torch.cat(
        (
            torch.arange(size.decode_requests) < real.decode_requests,
            torch.arange(size.prefill_requests) < real.prefill_requests,
        )
    )
    assert (batch.context_lens[~is_row] == 0).all()
    assert (batch.block_tables[~is_row] == sizes.dummy_block).all()
    for lens in (batch.cu_prefill_lens.diff(), batch.cu_scan_chunks.diff()):
        assert (lens >= 0).all()
        assert int(lens.sum()) == real.tokens - real.decode_requests
    assert_in_range(batch)


def assert_in_range(batch: BatchMetadata) -> None:
    """Check that whatever is used as an index is one."""
    size, chunks = batch.padded_shape, len(batch.scan_chunk_rows)
    for index, limit in (
        (batch.snapshot_rows, size.prefill_requests),
        (batch.scan_chunk_rows, size.prefill_requests),
        (batch.last_scan_chunks, chunks),
        (batch.snapshot_scan_chunks, chunks),
        (batch.logit_index, size.tokens),
        (batch.sample_index, len(batch.logit_index)),
    ):
        assert ((index >= 0) & (index < limit)).all()


# Steps at the shapes of graphs, which share one buffer.

PADDED_SIZES = replace(make_sizes(), graph_shapes=graph_shapes(4, 200))
#: Steps of one padded shape, full and nearly empty.
LIKE_STEPS = [
    make_step(
        PADDED_SIZES,
        [Slice(31, 32, 1, snapshots=[32]), *[Slice(70 + n, 71 + n) for n in range(3)]],
        [Slice(32, 64, snapshots=[48, 64], is_resumed=True)],
    ),
    make_step(PADDED_SIZES, [Slice(7, 8), Slice(1, 2)], [Slice(0, 17, rest=3)]),
]


def make_builder() -> Any:
    """Make a builder whose steps are padded."""
    builder = load("optimized", "metadata").MetadataBuilder
    return builder(PADDED_SIZES, torch.get_default_device())


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (1, 1, 0, 0)])
def test_a_buffer_holds_one_step_alone(order: tuple[int, ...]) -> None:
    """Nothing stays of an earlier step of the same shape, in either host buffer."""
    builder, apart = make_builder(), make_builder()
    # Without fixed places, each step gets memory of its own.
    apart._fixed = set()
    for index in order:
        batch = builder.build(*LIKE_STEPS[index], False)
        assert batch.padded_shape == BatchShape(36, 1, 4)
        assert_same_batch(batch, apart.build(*LIKE_STEPS[index], False))


@pytest.mark.parametrize(
    "piece",
    [
        Slice(0, 48, snapshots=[16, 32, 48]),
        Slice(31, 79, snapshots=[32, 48, 64]),
        Slice(15, 17, snapshots=[16]),
        Slice(15, 33),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 4])
def test_the_fullest_steps_fit_their_shape(piece: Slice, count: int) -> None:
    """All states and scan chunks that its rows can have find room in it."""
    pieces = [replace(piece) for _ in range(count)]
    plan, requests = make_step(PADDED_SIZES, [], pieces)
    batch = make_builder().build(plan, requests, False)
    assert batch.padded_shape == host_shape(plan.shape, PADDED_SIZES.graph_shapes)


def test_a_step_that_fits_no_room_leaves_the_buffer_alone() -> None:
    """What runs at its real size is sent elsewhere."""
    builder = make_builder()
    batch = builder.build(*LIKE_STEPS[0], False)
    before = {name: copy.deepcopy(value) for name, value in entries(batch).items()}
    many = SamplingParams(seed=0, min_tokens=2, stop_token_ids=tuple(range(9)))
    step = make_step(PADDED_SIZES, [], [Slice(0, 20, sampling=many)])
    assert builder.build(*step, False).padded_shape == BatchShape(20, 1, 0)
    for name, value in entries(batch).items():
        if isinstance(value, Tensor):
            assert_equal(value, before[name])
