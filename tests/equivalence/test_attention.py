"""Attention of tiles of tokens against token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.batch import BatchMetadata
from lockstep.config import Sizes
from tests.factories import PART_ROTARY, ROTARY, generator, load, randn
from tests.host_reads import no_host_reads
from tests.padded import place, split
from tests.plans import (
    Padding,
    Slice,
    Step,
    build,
    build_padded,
    edge_lengths,
    make_sizes,
    make_step,
    paddings,
    steps,
)
from tests.tolerances import assert_budgeted, assert_equal

SIZES = make_sizes()
HEAD_DIM, SCALE = 6, 0.4
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
#: Query heads and K/V heads.
HEADS = [(4, 2), (6, 2), (9, 3), (3, 3), (5, 1)]
ROTARIES = (ROTARY, PART_ROTARY, replace(ROTARY, kind="linear", factor=3.0))
TILE = load("optimized", "attention")._TILE_TOKENS


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of the real tokens of a step."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(
        cls,
        count: int,
        heads: tuple[int, int] = (6, 2),
        dtype: torch.dtype = torch.float32,
    ) -> Heads:
        """Draw all heads of all tokens."""
        sizes = (heads[0], heads[1], heads[1])
        return cls(
            *(
                randn(count, size, HEAD_DIM, seed=seed, dtype=dtype)
                for seed, size in enumerate(sizes)
            )
        )

    def apply(self, function: Callable[[Tensor], Tensor]) -> Heads:
        """Apply a function to each."""
        return Heads(*map(function, (self.queries, self.keys, self.values)))


def pools(
    sizes: Sizes, step: Step, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Make blocks in which only what earlier steps wrote is a number."""
    shape = sizes.num_blocks + 1, sizes.block_size, kv_heads, HEAD_DIM
    made = torch.full((2, *shape), torch.nan, dtype=dtype)
    for seed, row in enumerate(step[0].rows):
        count = max(row.start, row.num_shared_blocks * sizes.block_size)
        written = randn(2, count, *shape[2:], seed=100 + seed, dtype=dtype)
        positions = torch.arange(count)
        blocks = torch.tensor(row.block_table)[positions // sizes.block_size]
        made[:, blocks, positions % sizes.block_size] = written
    return made[0], made[1]


def run(
    side: str, heads: Heads, blocks: tuple[Tensor, Tensor], batch: BatchMetadata
) -> Tensor:
    """Append the K/V of all tokens, then attend from the real ones, as a model does."""
    attention = load(side, "attention")
    placed = heads.apply(lambda part: place(part, batch))
    attention.append_kv(placed.keys, placed.values, *blocks, batch.kv_index)
    decoding, prefilling = split(placed.queries, batch)
    decoded = attention.attend_decode(decoding, *blocks, SCALE, batch)
    prefilled = attention.attend_prefill(prefilling, *blocks, SCALE, batch)
    outputs = torch.cat((decoded, prefilled))
    if side == "optimized":
        assert not outputs[~batch.token_mask].any()
    return outputs[batch.token_mask]


def assert_twins(
    sizes: Sizes,
    step: Step,
    batch: BatchMetadata | None = None,
    heads: tuple[int, int] = (6, 2),
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
) -> None:
    """Hold blocks equal, and outputs to their budget."""
    real = build("reference", sizes, step, all_logits=False)
    drawn = Heads.random(real.shape.tokens, heads, dtype)
    mine, theirs = [pools(sizes, step, heads[1], pool_dtype) for _ in range(2)]
    outputs = run("optimized", drawn, mine, batch or real)
    run("reference", drawn, theirs, real)
    for actual, expected in zip(mine, theirs, strict=True):
        assert_equal(actual[: sizes.dummy_block], expected[: sizes.dummy_block])
    # What this step writes is as coarse as what was there.
    coarse = [part.to(pool_dtype) for part in (drawn.keys, drawn.values)]
    rounded = Heads(drawn.queries, coarse[0], coarse[1])
    wide = [part.double() for part in pools(sizes, step, heads[1], pool_dtype)]
    exact = run("reference", rounded.apply(Tensor.double), (wide[0], wide[1]), real)
    assert outputs.dtype == dtype
    assert_budgeted("attention", outputs, exact)


def edge_slices(sizes: Sizes, start: int) -> list[Slice]:
    """Make slices of all lengths at which something changes."""
    lengths = {*edge_lengths(sizes), TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE + 5}
    return [Slice(start, start + length) for length in sorted(lengths)]


@pytest.mark.parametrize(("chunk", "blocks"), [(16, 1), (16, 3), (32, 1)])
@pytest.mark.parametrize("start", [0, 15, 16, 17, 75])
def test_edge_slices(chunk: int, blocks: int, start: int) -> None:
    """Ragged rows from any start, in blocks of any size."""
    sizes = make_sizes(chunk, blocks)
    assert_twins(sizes, make_step(sizes, [], edge_slices(sizes, start)))


@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads: tuple[int, int]) -> None:
    """Any number of query heads to a K/V head."""
    step = make_step(SIZES, [Slice(40, 41), Slice(0, 1)], edge_slices(SIZES, 5))
    assert_twins(SIZES, step, heads=heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Queries and pool of any width."""
    step = make_step(SIZES, [Slice(40, 41), Slice(0, 1)], edge_slices(SIZES, 5))
    assert_twins(SIZES, step, dtype=dtype, pool_dtype=pool_dtype)


def test_scores_are_not_rounded() -> None:
    """Large scores of coarse heads, close to each other, are told apart."""
    step = make_step(SIZES, [], [Slice(0, 37)])
    batch = build("optimized", SIZES, step, all_logits=False)
    heads = Heads.random(37, dtype=torch.bfloat16)
    heads.queries.add_(8)
    heads.keys.div_(16).add_(8)
    blocks = pools(SIZES, step, dtype=torch.bfloat16)
    outputs = run("optimized", heads, blocks, batch)
    wide = pools(SIZES, step, dtype=torch.float64)
    exact = run("reference", heads.apply(Tensor.double), wide, batch)
    assert_budgeted("attention", outputs, exact)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("is_decode", [False, True])
def test_rows_of_one_kind(count: int, is_decode: bool) -> None:
    """One or many rows of a kind, and none of the other."""
    pieces = [Slice(9 * index, 9 * index + 1) for index in range(count)]
    step = make_step(SIZES, pieces, []) if is_decode else make_step(SIZES, [], pieces)
    assert_twins(SIZES, step)


@pytest.mark.parametrize("tile", [1, 2, 5, 64])
@pytest.mark.parametrize("positions", [1, 100, 300, 1000])
def test_tiles_of_any_size(
    tile: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the size of tiles nor how many there are at a time shows."""
    attention = load("optimized", "attention")
    monkeypatch.setattr(attention, "_TILE_TOKENS", tile)
    monkeypatch.setattr(attention, "_MAX_POSITIONS", positions)
    pieces = [Slice(20, 57), Slice(0, 1), Slice(3, 8), Slice(16, 64), Slice(1, 6)]
    step = make_step(SIZES, [Slice(40, 41), Slice(0, 1), Slice(15, 16)], pieces)
    assert_twins(SIZES, step)
    assert_twins(SIZES, step, build_padded(SIZES, step, Padding(2, 1, 40, 3)))


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and look at its result."""
        result = func(*args, **kwargs or {})
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self.size = max(self.size, made.numel())
        return result


@pytest.mark.parametrize("is_decode", [False, True])
def test_memory_is_that_of_few_tiles(
    is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where contexts are long, more rows do not take more memory at a time."""
    attention, sizes = load("optimized", "attention"), []
    monkeypatch.setattr(attention, "_MAX_POSITIONS", 1000)
    attend = attention.attend_decode if is_decode else attention.attend_prefill
    for count in (4, 8):
        many = [Slice(470, 471 if is_decode else 470 + TILE)] * count
        step = make_step(SIZES, many, []) if is_decode else make_step(SIZES, [], many)
        batch = build("optimized", SIZES, step, all_logits=False)
        queries = Heads.random(batch.shape.tokens).queries
        blocks = pools(SIZES, step)
        with Largest() as largest:
            attend(queries, *blocks, SCALE, batch)
        sizes.append(largest.size)
    assert sizes[0] == sizes[1]


@given(data=st.data(), padding=paddings())
def test_any_padded_step(data: st.DataObject, padding: Padding) -> None:
    """Rows of both kinds from a plan, among NaN; only the dummy block takes any."""
    step = data.draw(steps(SIZES))
    assert_twins(SIZES, step, build_padded(SIZES, step, padding))


@pytest.mark.parametrize("num_shared", [1, 2])
def test_shared_blocks_stay_the_same(num_shared: int) -> None:
    """Tokens whose K/V exists are computed, read what is there, and write nothing."""
    pieces = [Slice(start, 40, num_shared) for start in (0, 5, 16)]
    step = make_step(SIZES, [Slice(31, 32, num_shared)], pieces)
    batch = build_padded(SIZES, step, Padding(1, 2, 3, 4))
    blocks = pools(SIZES, step)
    shared = [b for row in step[0].rows for b in row.block_table[:num_shared]]
    before = [part[shared].clone() for part in blocks]
    run("optimized", Heads.random(batch.shape.tokens), blocks, batch)
    for part, expected in zip(blocks, before, strict=True):
        assert expected.isfinite().all()
        assert_equal(part[shared], expected)
    assert_twins(SIZES, step, batch)


def test_a_row_of_nan_harms_no_other() -> None:
    """What goes wrong in a row stays in it."""
    step = make_step(SIZES, [], [Slice(3, 20), Slice(5, 70), Slice(9, 12)])
    batch = build("optimized", SIZES, step, all_logits=False)
    heads = Heads.random(85)
    expected = run("optimized", heads, pools(SIZES, step), batch)
    poisoned = heads.apply(torch.clone)
    for part in (poisoned.queries, poisoned.keys, poisoned.values):
        part[17:82] = torch.nan
    outputs = run("optimized", poisoned, pools(SIZES, step), batch)
    assert outputs[17:82].isnan().all()
    for rows in (slice(0, 17), slice(82, 85)):
        assert_budgeted("attention", outputs[rows], expected[rows])


# Rotary position encoding.


def some_positions(count: int) -> Tensor:
    """Draw positions."""
    order = torch.randperm(64, generator=generator(2), device="cpu")
    return order[:count].to(torch.get_default_device())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", ROTARIES, ids=lambda config: config.kind)
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 37])
@pytest.mark.parametrize("heads", HEADS)
def test_rotary_twins(
    config: object, count: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Any number of tokens and heads."""
    drawn, positions = Heads.random(count, heads, dtype), some_positions(count)
    given = drawn.queries, drawn.keys
    actual = load("optimized", "attention").apply_rotary(*given, positions, config)
    wide = [part.double() for part in given]
    exact = load("reference", "attention").apply_rotary(*wide, positions, config)
    for mine, theirs in zip(actual, exact, strict=True):
        assert mine.dtype == dtype
        assert_budgeted("rotary", mine, theirs)


def test_rotary_far_away() -> None:
    """Positions that the dtype of the heads does not have are no others."""
    drawn, positions = Heads.random(37, dtype=torch.bfloat16), some_positions(37) * 997
    given = drawn.queries, drawn.keys, positions, PART_ROTARY
    turned = [
        load(side, "attention").apply_rotary(*given)
        for side in ("optimized", "reference")
    ]
    for actual, expected in zip(*turned, strict=True):
        assert_budgeted("rotary", actual, expected)


def test_rotary_of_padding_harms_no_other() -> None:
    """Padding may hold anything, and inputs stay as they are."""
    drawn, positions = Heads.random(21), some_positions(21)
    apply = load("optimized", "attention").apply_rotary
    expected = apply(drawn.queries, drawn.keys, positions, PART_ROTARY)
    is_real = torch.arange(21) % 5 != 3
    for part in (drawn.queries, drawn.keys):
        part[~is_real] = torch.nan
    before = drawn.apply(torch.clone)
    actual = apply(drawn.queries, drawn.keys, positions, PART_ROTARY)
    assert_equal(drawn.queries, before.queries)
    assert_equal(drawn.keys, before.keys)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_budgeted("rotary", mine[is_real], theirs[is_real])


def append_turned(
    side: str, heads: Heads, positions: Tensor, config: object, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Append to blocks of NaN; return queries and K/V, which are nowhere else."""
    count, kv_heads = heads.keys.shape[:2]
    made = torch.full((2, 4, 16, kv_heads, HEAD_DIM), torch.nan, dtype=dtype)
    order = torch.randperm(64, generator=generator(7), device="cpu")
    index = order[:count].to(heads.keys.device)
    parts = heads.queries, heads.keys, heads.values
    turned = load(side, "attention").append_rotary_kv(
        *parts, *made, index, positions, config
    )
    places = made.flatten(1, 2)
    written = places[:, index]
    places[:, index] = torch.nan
    assert places.isnan().all()
    return turned, written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", ROTARIES, ids=lambda config: config.kind)
@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.parametrize("heads", HEADS)
def test_turned_twins(
    config: object, count: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Queries and keys are turned, values are not; each K/V is in its place."""
    drawn, positions = Heads.random(count, heads, dtype), some_positions(count)
    turned, written = append_turned("optimized", drawn, positions, config, dtype)
    wide = drawn.apply(Tensor.double), positions, config, torch.float64
    exact, stored = append_turned("reference", *wide)
    assert turned.dtype == dtype
    assert_budgeted("rotary", turned, exact)
    assert_budgeted("rotary", written[0], stored[0])
    assert_equal(written[1].double(), stored[1])


@pytest.mark.parametrize("model", [torch.float32, torch.float16])
def test_turned_keys_are_rounded_as_the_model_then_as_the_pool(
    model: torch.dtype,
) -> None:
    """So what a cache of another dtype holds is what the model would have held."""
    drawn, positions = Heads.random(5, dtype=model), some_positions(5)
    pool = torch.float16 if model == torch.float32 else torch.float32
    _, own = append_turned("optimized", drawn, positions, PART_ROTARY, model)
    _, other = append_turned("optimized", drawn, positions, PART_ROTARY, pool)
    assert_equal(other, own.to(pool))


def test_turning_of_padding_harms_no_other() -> None:
    """Padding may hold anything, and inputs stay as they are."""
    drawn, positions = Heads.random(21), some_positions(21)
    given = positions, PART_ROTARY, torch.float32
    expected = append_turned("optimized", drawn, *given)
    is_real = torch.arange(21) % 5 != 3
    spoiled = drawn.apply(torch.clone)
    for part in (spoiled.queries, spoiled.keys, spoiled.values):
        part[~is_real] = torch.nan
    before = spoiled.apply(torch.clone)
    turned, written = append_turned("optimized", spoiled, *given)
    for name in ("queries", "keys", "values"):
        assert_equal(getattr(spoiled, name), getattr(before, name))
    assert_budgeted("rotary", turned[is_real], expected[0][is_real])
    assert_budgeted("rotary", written[:, is_real], expected[1][:, is_real])


def test_nothing_is_read_back() -> None:
    """The host never waits for a number from the device."""
    step = make_step(SIZES, [Slice(7, 8)], [Slice(3, 40), Slice(0, 100)])
    batch, blocks = build_padded(SIZES, step, Padding(1, 2, 3, 4)), pools(SIZES, step)
    placed = Heads.random(batch.shape.tokens).apply(lambda part: place(part, batch))
    attention = load("optimized", "attention")
    with no_host_reads():
        new = placed.keys, placed.values, *blocks, batch.kv_index
        attention.append_kv(*new)
        queries = attention.append_rotary_kv(
            placed.queries, *new, batch.positions, ROTARY
        )
        decoding, prefilling = split(queries, batch)
        attention.attend_decode(decoding, *blocks, SCALE, batch)
        attention.attend_prefill(prefilling, *blocks, SCALE, batch)
