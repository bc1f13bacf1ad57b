"""Attention, experts, activations and draws at the sizes of nano3, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Case
from benchmarks.shapes import NANO3
from lockstep.batch import Draws
from lockstep.config import MoeConfig

HEADS, KV_HEADS = NANO3["num_attention_heads"], NANO3["num_key_value_heads"]
HEAD_DIM, HIDDEN, VOCAB = NANO3["head_dim"], NANO3["hidden_size"], NANO3["vocab_size"]
EXPERTS, TOP_K = NANO3["n_routed_experts"], NANO3["num_experts_per_tok"]
INNER = NANO3["moe_intermediate_size"]
SHARED = NANO3["moe_shared_expert_intermediate_size"]
BLOCK, ITEM = 256, 2
MOE = MoeConfig(EXPERTS, TOP_K, INNER, SHARED, scaling=2.5)
#: Bytes of one token's keys and values in one layer.
KV_BYTES = 2 * KV_HEADS * HEAD_DIM * ITEM


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw normal numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def full(count: int, value: int) -> Tensor:
    """Make equal whole numbers on the device."""
    return torch.full((count,), value, dtype=torch.int64, device="cuda")


def cases() -> Iterator[Case]:
    """List all cases."""
    yield from _attention()
    yield from _experts()
    yield from _draws()


def _attention() -> Iterator[Case]:
    """Decode rows of equal contexts; a slice of one row over what is cached."""
    for rows, context in ((1, 8192), (8, 8192), (64, 2048), (64, 8192), (256, 1024)):
        yield Case(
            f"attend_decode {rows}x{context}",
            partial(_decode, rows, context),
            rows * context * KV_BYTES,
            4 * rows * context * HEADS * HEAD_DIM,
        )
    for start, length in ((0, 512), (0, 8192), (30000, 2048)):
        yield Case(
            f"attend_prefill {length} after {start}",
            partial(_prefill, start, length),
            (start + length) * KV_BYTES + 2 * length * HEADS * HEAD_DIM * ITEM,
            4 * length * (start + length // 2) * HEADS * HEAD_DIM,
        )
    for count in (64, 8192):
        yield Case(
            f"append_kv {count}",
            partial(_append, count),
            2 * count * KV_BYTES,
        )


def _pools(num_blocks: int) -> Tensor:
    return randn(2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM)


def _decode(rows: int, context: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.attention import attend_decode

    width = context // BLOCK
    pools, queries = _pools(rows * width), randn(rows, HEADS, HEAD_DIM)
    tables = torch.randperm(rows * width, device="cuda").view(rows, width)
    batch: Any = SimpleNamespace(
        block_tables=tables, context_lens=full(rows, context), num_decode_tokens=rows
    )
    given = pools[0], pools[1], HEAD_DIM**-0.5, batch
    return partial(attend_decode, queries, *given)


def _prefill(start: int, length: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.attention import attend_prefill

    width = -(-(start + length) // BLOCK)
    pools, queries = _pools(width), randn(length, HEADS, HEAD_DIM)
    batch: Any = SimpleNamespace(
        block_tables=torch.randperm(width, device="cuda")[None],
        cu_prefill_lens=torch.tensor([0, length], device="cuda"),
        prefill_starts=full(1, start),
        num_decode_tokens=0,
    )
    given = pools[0], pools[1], HEAD_DIM**-0.5, batch
    return partial(attend_prefill, queries, *given)


def _append(count: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.attention import append_kv

    pools, new = _pools(64), randn(2, count, KV_HEADS, HEAD_DIM)
    index = torch.randperm(64 * BLOCK, device="cuda")[:count]
    return partial(append_kv, new[0], new[1], pools[0], pools[1], index)


def _experts() -> Iterator[Case]:
    """Uniformly routed tokens; experts that none of them visits are not read."""
    for count in (1, 8, 64, 256, 2048, 8192):
        visited = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** count)
        rows = 2 * count * HIDDEN * ITEM
        yield Case(
            f"apply_experts {count}",
            partial(_moe, count),
            int(visited * 2 * HIDDEN * INNER * ITEM) + rows,
            4 * count * TOP_K * HIDDEN * INNER,
        )
    for count in (64, 8192):
        yield Case(
            f"route {count}",
            partial(_route, count),
            count * HIDDEN * ITEM + EXPERTS * HIDDEN * 4,
            2 * count * HIDDEN * EXPERTS,
        )
        yield Case(
            f"activate {count}",
            partial(_activate, count),
            2 * count * SHARED * ITEM,
        )


def _moe(count: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.moe import apply_experts

    up = randn(EXPERTS, INNER, HIDDEN).mul_(HIDDEN**-0.5)
    down = randn(EXPERTS, HIDDEN, INNER).mul_(INNER**-0.5)
    ids = torch.rand(count, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].sort(1).values
    weights = torch.rand(count, TOP_K, device="cuda")
    hidden = randn(count, HIDDEN)
    return lambda: apply_experts(hidden, ids, weights, up, down, MOE)


def _route(count: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.moe import route

    router = randn(EXPERTS, HIDDEN, dtype=torch.float32).mul_(HIDDEN**-0.5)
    correction = randn(EXPERTS, dtype=torch.float32).mul_(0.1)
    mask = torch.ones(count, dtype=torch.bool, device="cuda")
    hidden = randn(count, HIDDEN)
    return lambda: route(hidden, router, correction, MOE, mask)


def _activate(count: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.mlp import activate

    inputs = randn(count, SHARED)
    return lambda: activate(inputs, "relu2")


def _draws() -> Iterator[Case]:
    """Rows of one kind."""
    kinds: dict[str, tuple[float, int, float]] = {
        "greedy": (0.0, 0, 1.0),
        "random": (1.0, 0, 1.0),
        "top-p": (1.0, 0, 0.95),
        "top-k and top-p": (1.0, 50, 0.95),
    }
    for count in (1, 64):
        for name, kind in kinds.items():
            yield Case(
                f"sample {count} {name}",
                partial(_sample, count, *kind),
                count * VOCAB * 4,
            )
        yield Case(
            f"log_probabilities {count}",
            partial(_log_probabilities, count),
            2 * count * VOCAB * 4,
        )


def _sample(
    count: int, temperature: float, top_k: int, top_p: float
) -> Callable[[], Any]:
    from lockstep.optimized.kernels.sampler import sample

    logits = randn(count, VOCAB, dtype=torch.float32).mul_(3)
    real = torch.zeros(count, dtype=torch.float64, device="cuda")
    draws = Draws(
        real.float() + temperature,
        full(count, top_k),
        real + top_p,
        real,
        torch.arange(count, device="cuda"),
        torch.arange(count, device="cuda"),
        full(count, -1)[:, None],
    )
    return lambda: sample(logits, draws)


def _log_probabilities(count: int) -> Callable[[], Any]:
    from lockstep.optimized.kernels.sampler import log_probabilities

    logits = randn(count, VOCAB, dtype=torch.float32).mul_(3)
    return lambda: log_probabilities(logits)
