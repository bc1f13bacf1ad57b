"""Configurations of attention, experts and draws, as calls on tensors of no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from lockstep.batch import Draws
from lockstep.config import Activation, MoeConfig, RotaryConfig

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
#: Query heads, K/V heads and width: of two published models, and an odd one.
HEADS = ((32, 2, 128), (32, 8, 128), (9, 3, 80))
#: Of heads that are wide, or many to a K/V head: but for proofs in float64.
WIDE = ((16, 8, 256), (16, 4, 192), (16, 2, 512), (128, 1, 256))
VOCAB = 131072
#: Whether experts are gated, and by what.
EXPERTS: tuple[tuple[bool, Activation], ...] = (
    (False, "relu2"),
    (True, "silu"),
    (False, "gelu"),
    (True, "gelu"),
)
#: Whose kernels these are.
MODULES = ("attention", "mlp", "moe", "sampler")
Call = Callable[[], Any]


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor that has a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> dict[str, Call]:
    """Name a call for each configuration."""
    named = list(_draws())
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for cases_of in (_attention, _experts, _routes, _activations):
            named += [(f"{key} {name}", call) for key, call in cases_of(dtype)]
    found = dict(named)
    # Of two under one name, the first would never be compiled.
    assert len(found) == len(named)
    return found


def _attention(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    from lockstep.optimized.kernels import attention as kernels

    wide = WIDE if dtype != torch.float64 else ()
    for num_heads, num_kv_heads, head_dim in (*HEADS[dtype.itemsize // 4 :], *wide):
        new = empty(2, 64, num_kv_heads, head_dim, dtype=dtype)
        queries = empty(64, num_heads, head_dim, dtype=dtype)
        index = empty(64)
        shape = f"{num_heads}/{num_kv_heads}/{head_dim}"
        for size in (16,) if head_dim > 128 else (16, 256):
            pools = empty(2, 99, size, num_kv_heads, head_dim, dtype=dtype)
            batch: Any = SimpleNamespace(
                block_tables=empty(512, 40),
                context_lens=empty(512),
                cu_prefill_lens=empty(9),
                prefill_starts=empty(8),
                num_decode_tokens=0,
            )
            name = f"{shape} in blocks of {size}"
            given = *pools, 0.1, batch
            appended = *new, *pools, index
            yield f"append {name}", partial(kernels.append_kv, *appended)
            for part in (0.5, 1.0):
                turned = queries, *appended, index, RotaryConfig(part=part)
                call = partial(kernels.append_rotary_kv, *turned)
                yield f"append rotary {part} of {name}", call
            yield f"prefill {name}", partial(kernels.attend_prefill, queries, *given)
            # From one split of a row's context to as many as there are.
            for count in (1, 32, 64, 512):
                rows = empty(count, num_heads, head_dim, dtype=dtype)
                yield (
                    f"decode {count} of {name}",
                    partial(kernels.attend_decode, rows, *given),
                )


def _experts(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    from lockstep.optimized.kernels import moe as kernels

    wide = torch.promote_types(dtype, torch.float32)
    for gated, activation in EXPERTS:
        # Of two published models, with inner widths that a step divides or does not.
        inner, hidden = (768, 2048) if gated else (1856, 2688)
        config = MoeConfig(128, 6, inner, 0, activation=activation, gated=gated)
        up = empty(128, inner * (2 if gated else 1), hidden, dtype=dtype)
        down = empty(128, hidden, inner, dtype=dtype)
        for tile in kernels._TILES[dtype.itemsize]:
            count = tile.rows * 17
            tokens = empty(count, hidden, dtype=dtype)
            ids, weights = empty(count, 6), empty(count, 6, dtype=wide)
            given = tokens, ids, weights, up, down, config
            name = f"experts {activation} {gated} {count}"
            yield name, partial(kernels.apply_experts, *given)

    # Triton takes a size of one for a constant.
    tokens, weights = empty(4, 1, dtype=dtype), empty(4, 2, dtype=wide)
    for gated, activation in EXPERTS[:2]:
        config = MoeConfig(8, 2, 1, 0, activation=activation, gated=gated)
        up, down = empty(8, 1 + gated, 1, dtype=dtype), empty(8, 1, 1, dtype=dtype)
        given = tokens, empty(4, 2), weights, up, down, config
        yield f"experts of one {gated}", partial(kernels.apply_experts, *given)


def _routes(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    from lockstep.optimized.kernels.moe import route

    wide = torch.promote_types(dtype, torch.float32)
    tokens, mask = empty(64, 2688, dtype=dtype), empty(64, dtype=torch.bool)
    router, correction = empty(128, 2688, dtype=wide), empty(128, dtype=wide)
    plain = MoeConfig(128, 6, 1856, 3712, scaling=2.5)
    for name, given, config in (
        ("plain", correction, plain),
        ("unscaled", correction, replace(plain, normalize_weights=False)),
        ("groups", correction, replace(plain, num_groups=8, top_k_groups=3)),
        ("softmax", None, replace(plain, scoring="softmax", scaling=1.0)),
    ):
        routed = tokens, router, given, config, mask
        yield f"route {name}", partial(route, *routed)


def _activations(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    from lockstep.optimized.kernels import mlp as kernels

    inputs = empty(64, 3712, dtype=dtype)
    for activation in get_args(Activation):
        yield f"activate {activation}", partial(kernels.activate, inputs, activation)
        yield f"gate {activation}", partial(kernels.activate_gated, inputs, activation)


def _draws() -> Iterator[tuple[str, Call]]:
    from lockstep.optimized.kernels import sampler as kernels

    # Few rows are searched by many programs each, many by one.
    for count in (1, 64, 256, 1024):
        real, whole = empty(count, dtype=torch.float64), empty(count)
        banned = empty(count, 2)
        draws = Draws(real.float(), whole, real, real, whole, whole, banned)
        for size in (61, VOCAB):
            logits = empty(count, size, dtype=torch.float32)
            yield f"sample {count} of {size}", partial(kernels.sample, logits, draws)
    for size in (61, VOCAB):
        logits = empty(64, size, dtype=torch.float32)
        yield f"log {size}", partial(kernels.log_probabilities, logits)
