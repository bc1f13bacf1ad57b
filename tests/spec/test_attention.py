"""Attention over blocks: right, cut anywhere, wherever the blocks lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import BambaConfig, LlamaConfig
from transformers.models.bamba import modeling_bamba
from transformers.models.llama import modeling_llama

from lockstep.config import RotaryConfig
from tests import oracles
from tests.factories import (
    DEVICE,
    PART_ROTARY,
    ROTARY,
    Row,
    at_alignment,
    dummies,
    generator,
    load,
    make_batch,
    model_config,
    plan_sizes,
)
from tests.factories import randn as draw
from tests.tolerances import (
    assert_budgeted,
    assert_consistent,
    assert_equal,
    assert_same_order,
)

SIZES = plan_sizes(model_config("attention"))
BLOCK = SIZES.block_size
KV_HEADS, HEAD_DIM, SCALE = 2, 6, 0.4
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ROTARIES = {
    "whole": ROTARY,
    "part": replace(ROTARY, part=0.7),
    "linear": replace(ROTARY, kind="linear", factor=3.0),
    "llama3": replace(PART_ROTARY, part=1.0),
    "llama3, part": PART_ROTARY,
}


@dataclass
class Sequence:
    """Queries, keys and values of one request."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(
        cls,
        length: int,
        heads: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Sequence:
        """Draw a request."""
        return cls(
            draw(length, heads, HEAD_DIM, seed=seed, dtype=dtype),
            draw(length, KV_HEADS, HEAD_DIM, seed=seed + 1, dtype=dtype),
            draw(length, KV_HEADS, HEAD_DIM, seed=seed + 2, dtype=dtype),
        )

    def exact(self) -> Tensor:
        """Attend in float64."""
        return oracles.attend(self.queries, self.keys, self.values, SCALE)


def pools(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Make blocks of NaN: what nobody wrote must not be read."""
    shape = (SIZES.num_blocks + 1, BLOCK, KV_HEADS, HEAD_DIM)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(
        shape, torch.nan, dtype=dtype
    )


def run(
    side: str,
    blocks: tuple[Tensor, Tensor],
    decodes: list[tuple[Sequence, Row]],
    prefills: list[tuple[Sequence, Row]],
) -> Tensor:
    """Append the K/V of all rows, then attend, as a model does."""
    attention = load(side, "attention")
    batch = make_batch(SIZES, [r for _, r in decodes], [r for _, r in prefills])
    queries, keys, values = (
        torch.cat([getattr(s, name)[r.start : r.end] for s, r in decodes + prefills])
        for name in ("queries", "keys", "values")
    )
    attention.append_kv(keys, values, *blocks, batch.kv_index)
    count = batch.num_decode_tokens
    decoded = attention.attend_decode(queries[:count], *blocks, SCALE, batch)
    prefilled = attention.attend_prefill(queries[count:], *blocks, SCALE, batch)
    return torch.cat((decoded, prefilled))


def row(start: int, end: int, blocks: list[int]) -> Row:
    """Make a row of a slice."""
    return Row(start, dummies(end - start), 0, blocks=blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_prefill_equals_dense_attention(
    side: str, length: int, heads: int, dtype: torch.dtype
) -> None:
    """Query heads share K/V heads, and no token sees a later one."""
    sequence = Sequence.random(length, heads, dtype=dtype)
    outputs = run(side, pools(dtype), [], [(sequence, row(0, length, [7, 2, 5]))])
    assert_budgeted("attention", outputs, sequence.exact())


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_torch(side: str, length: int) -> None:
    """An independent implementation gives the same."""
    s = Sequence.random(length)
    outputs = run(side, pools(), [], [(s, row(0, length, [7, 2, 5]))])
    queries, keys, values = (
        part.transpose(0, 1)[None] for part in (s.queries, s.keys, s.values)
    )
    theirs = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=True,
        scale=SCALE,
        enable_gqa=True,
    )
    assert_budgeted("attention", outputs, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_prefill(side: str, dtype: torch.dtype) -> None:
    """Token after token gives what one slice gives."""
    length = BLOCK + 3
    sequence = Sequence.random(length, dtype=dtype)
    whole = run(side, pools(dtype), [], [(sequence, row(0, length, [3, 1]))])
    blocks = pools(dtype)
    steps = [
        run(side, blocks, [(sequence, row(t, t + 1, [3, 1]))], [])
        for t in range(length)
    ]
    assert_consistent(side, "attention", torch.cat(steps), whole)


@given(
    pieces=st.lists(st.integers(1, BLOCK + 1), min_size=1, max_size=5),
    table=st.permutations(range(6)),
)
def test_pieces_equal_the_whole(side: str, pieces: list[int], table: list[int]) -> None:
    """A row cut anywhere, in blocks of any order, gives the same numbers."""
    length = sum(pieces)
    sequence = Sequence.random(length)
    whole = run(side, pools(), [], [(sequence, row(0, length, list(range(6))))])
    blocks, outputs, start = pools(), [], 0
    for count in pieces:
        piece = row(start, start + count, list(table))
        outputs.append(run(side, blocks, [], [(sequence, piece)]))
        start += count
    assert_consistent(side, "attention", torch.cat(outputs), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@given(order=st.permutations(range(3)), num_decodes=st.integers(0, 3))
def test_company_changes_nothing(
    side: str, dtype: torch.dtype, order: list[int], num_decodes: int
) -> None:
    """A row gets the same numbers alone and in any place and order."""
    lengths, tables = [5, BLOCK, 2 * BLOCK + 1], [[9], [4], [8, 0, 6]]
    sequences = [Sequence.random(n, seed=n, dtype=dtype) for n in lengths]
    blocks = pools(dtype)
    alone: list[Tensor] = []
    for s, n, table in zip(sequences, lengths, tables, strict=True):
        alone.append(run(side, blocks, [], [(s, row(0, n, table))])[-1:])
    # All but the last token is in the blocks by now: each row computes that one.
    rows = [(sequences[i], row(lengths[i] - 1, lengths[i], tables[i])) for i in order]
    together = run(side, blocks, rows[:num_decodes], rows[num_decodes:])
    expected = torch.cat([alone[i] for i in order])
    assert_consistent(side, "attention", together, expected)


def test_shared_blocks(side: str) -> None:
    """A row may read a prefix that another request computed."""
    first, second = Sequence.random(BLOCK + 4), Sequence.random(BLOCK + 4, seed=9)
    for name in ("keys", "values"):
        getattr(second, name)[:BLOCK] = getattr(first, name)[:BLOCK]
    blocks = pools()
    run(side, blocks, [], [(first, row(0, BLOCK + 4, [3, 1]))])
    outputs = run(side, blocks, [], [(second, row(BLOCK, BLOCK + 4, [3, 5]))])
    assert_budgeted("attention", outputs, second.exact()[BLOCK:])


def test_append_writes_one_place_a_token(side: str) -> None:
    """Each token's K/V lands in its place, in the pool's dtype, and nowhere else."""
    blocks = pools(torch.bfloat16)
    keys, values = draw(3, KV_HEADS, HEAD_DIM), draw(3, KV_HEADS, HEAD_DIM, seed=1)
    places = [(2, 5), (0, 0), (SIZES.dummy_block, 3)]
    index = torch.tensor([block * BLOCK + offset for block, offset in places])
    load(side, "attention").append_kv(keys, values, *blocks, index)
    for pool, rows in zip(blocks, (keys, values), strict=True):
        expected = torch.full_like(pool, torch.nan)
        for (block, offset), new in zip(places, rows, strict=True):
            expected[block, offset] = new.to(torch.bfloat16)
        assert_equal(pool, expected)


def test_blocks_of_another_dtype(side: str) -> None:
    """K/V may be stored more coarsely than the model computes."""
    sequence = Sequence.random(BLOCK + 2)
    blocks = pools(torch.bfloat16)
    outputs = run(side, blocks, [], [(sequence, row(0, BLOCK + 2, [3, 1]))])
    keys, values = sequence.keys.bfloat16(), sequence.values.bfloat16()
    exact = oracles.attend(sequence.queries, keys, values, SCALE)
    assert_budgeted("attention", outputs, exact)


def test_large_scores(side: str) -> None:
    """Scores that overflow an exponential are handled."""
    sequence = Sequence.random(9)
    sequence.queries *= 1000
    outputs = run(side, pools(), [], [(sequence, row(0, 9, [0]))])
    assert outputs.isfinite().all()


def test_no_tokens(side: str) -> None:
    """A batch may lack either kind of row."""
    attention, nothing = load(side, "attention"), torch.zeros(0, 4, HEAD_DIM)
    batch = make_batch(SIZES)
    for attend in (attention.attend_decode, attention.attend_prefill):
        assert_equal(attend(nothing, *pools(), SCALE, batch), nothing)


def some_heads(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Draw queries, keys and positions."""
    order = torch.randperm(64, generator=generator(2), device="cpu")
    positions = order[:count].to(DEVICE)
    queries = draw(count, 4, HEAD_DIM, dtype=dtype)
    return queries, draw(count, KV_HEADS, HEAD_DIM, seed=1, dtype=dtype), positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_equals_complex_products(
    side: str, name: str, dtype: torch.dtype
) -> None:
    """Pairs of channels are complex numbers, and turning is a product."""
    *heads, positions = some_heads(40, dtype)
    turned = load(side, "attention").apply_rotary(*heads, positions, ROTARIES[name])
    for actual, plain in zip(turned, heads, strict=True):
        exact = oracles.rotate(plain, positions, ROTARIES[name])
        coarse = torch.float32 if dtype == torch.float64 else dtype
        assert actual.dtype == dtype
        # Frequencies are float32 in every model.
        assert_budgeted("rotary", actual.to(coarse), exact)


def published_rotary(config: RotaryConfig) -> tuple[Any, Any]:
    """Return the published encoding, as a function of positions, and how it turns."""
    rope: dict[str, Any] = {
        "rope_type": config.kind,
        "rope_theta": config.theta,
        "partial_rotary_factor": config.part,
    }
    if config.kind != "default":
        rope["factor"] = config.factor
    if config.kind == "llama3":
        rope["low_freq_factor"] = config.low_factor
        rope["high_freq_factor"] = config.high_factor
        rope["original_max_position_embeddings"] = config.original_positions
    sizes: dict[str, Any] = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4}
    if config.part < 1:
        bamba = BambaConfig(**sizes, mamba_n_heads=4, rope_parameters=rope)
        embedding = modeling_bamba.BambaRotaryEmbedding(bamba)
        return embedding, modeling_bamba.apply_rotary_pos_emb
    llama = LlamaConfig(**sizes, rope_parameters=rope)
    embedding = modeling_llama.LlamaRotaryEmbedding(llama)
    return embedding, modeling_llama.apply_rotary_pos_emb


@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_equals_transformers(side: str, name: str) -> None:
    """The published encodings give the same, bit for bit, near and far.

    On the CPU, where both take their frequencies from.
    """
    queries, keys, positions = (part.cpu() for part in some_heads(40))
    apply = load(side, "attention").apply_rotary
    with torch.device("cpu"):
        embedding, turn = published_rotary(ROTARIES[name])
        for token, position in enumerate(positions * 997):
            here = slice(token, token + 1)
            row = queries[here], keys[here]
            cos, sin = embedding(row[0], position.view(1, 1))
            expected = turn(*row, cos[0], sin[0])
            actual = apply(*row, position.view(1), ROTARIES[name])
            for ours, theirs in zip(actual, expected, strict=True):
                assert_same_order(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_in_company(side: str, name: str, dtype: torch.dtype) -> None:
    """A token is turned the same alone, in a batch and at any alignment."""
    queries, keys, positions = some_heads(9, dtype)
    apply = load(side, "attention").apply_rotary
    together = apply(queries, keys, positions, ROTARIES[name])
    for token in range(len(queries)):
        here = slice(token, token + 1)
        row = at_alignment(queries[here], token), at_alignment(keys[here], token)
        alone = apply(*row, positions[here], ROTARIES[name])
        for part, whole in zip(alone, together, strict=True):
            assert_consistent(side, "rotary", part, whole[here])


def test_rotary_tells_distances(side: str) -> None:
    """Scores depend on how far apart two tokens are, and position 0 stays."""
    query, key, _ = (part[:1] for part in some_heads(1, torch.float64))
    apply = load(side, "attention").apply_rotary
    scores: list[Tensor] = []
    for position in (0, 3, 40):
        turned, _ = apply(query, key, torch.tensor([position + 5]), ROTARY)
        _, other = apply(query, key, torch.tensor([position]), ROTARY)
        scores.append(turned[0, 0] @ other[0, 0])
        if not position:
            assert_equal(other, key)
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0])


def test_rotary_of_nothing(side: str) -> None:
    """A batch may be empty."""
    nothing = torch.zeros(0, 4, HEAD_DIM), torch.zeros(0, KV_HEADS, HEAD_DIM)
    positions = torch.zeros(0, dtype=torch.int64)
    turned = load(side, "attention").apply_rotary(*nothing, positions, ROTARY)
    for actual, expected in zip(turned, nothing, strict=True):
        assert_equal(actual, expected)
