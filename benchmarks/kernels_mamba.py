"""Kernels of the Mamba side at the shape of Nemotron 3 Nano: bf16, states float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Case
from lockstep.batch import ScanTokens
from lockstep.config import MambaConfig
from lockstep.optimized.kernels import conv1d, norm, scan, snapshots

CONFIG = MambaConfig(num_heads=64, head_dim=64, state_size=128, num_groups=8)
CHANNELS, INNER, HEADS = CONFIG.conv_channels, CONFIG.inner_size, CONFIG.num_heads
HIDDEN = 2688
LAYERS = 23
STATE_BYTES = 4 * HEADS * CONFIG.head_dim * CONFIG.state_size
WINDOW_BYTES = 2 * CHANNELS * CONFIG.conv_window
DECODES = (1, 32, 256)
PREFILLS = ((1, 512), (1, 8192), (16, 2048), (128, 256))
EPS = 1e-5


def cases() -> Iterator[Case]:
    """List all cases."""
    for rows in DECODES:
        yield Case(f"scan_decode_{rows}", _scan_decode(rows), 2 * rows * STATE_BYTES)
        moved = rows * 2 * (WINDOW_BYTES + 2 * CHANNELS)
        yield Case(f"conv_decode_{rows}", _conv_decode(rows), moved)
    for rows, length in PREFILLS:
        tokens, name = rows * length, f"{rows}x{length}"
        moved = 4 * tokens * CHANNELS + 4 * rows * WINDOW_BYTES
        yield Case(f"conv_prefill_{name}", _conv_prefill(rows, length), moved)
        moved = 2 * tokens * (INNER + CHANNELS + HEADS) + 3 * rows * STATE_BYTES
        products = tokens * INNER * 2 * (CONFIG.scan_chunk_size + 2 * CONFIG.state_size)
        make = _scan_prefill(rows, length)
        yield Case(f"scan_prefill_{name}", make, moved, products)
    for tokens in (1, 256, 8192):
        yield Case(f"add_rms_norm_{tokens}", _add_rms_norm(tokens), 8 * tokens * HIDDEN)
        yield Case(f"rms_norm_{tokens}", _rms_norm(tokens), 4 * tokens * HIDDEN)
        yield Case(f"gated_norm_{tokens}", _gated_norm(tokens), 6 * tokens * INNER)
    for real in (0, 2):
        moved = 2 * real * LAYERS * (STATE_BYTES + WINDOW_BYTES)
        yield Case(f"copy_states_{real}_of_256", _copy_states(real), moved)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw normal numbers on the device."""
    return torch.randn(shape, dtype=dtype, device="cuda")


def ints(values: Any) -> Tensor:
    """Put whole numbers on the device."""
    return torch.as_tensor(values, dtype=torch.int64, device="cuda")


def projected(tokens: int) -> Tensor:
    """Draw what the input projection of a layer gives."""
    return randn(tokens, INNER + CHANNELS + HEADS)


def scan_layer() -> Any:
    """Draw decays as a trained model has them."""
    wide: Any = {"dtype": torch.float32, "device": "cuda"}
    dt = torch.exp(torch.empty(HEADS, **wide).uniform_(math.log(1e-3), math.log(0.1)))
    return SimpleNamespace(
        A=-torch.empty(HEADS, **wide).uniform_(1, 16),
        dt_bias=dt + torch.log(-torch.expm1(-dt)),
        D=torch.ones(HEADS, **wide),
    )


def scan_tokens(tokens: int) -> ScanTokens:
    """Draw tokens as a layer cuts them."""
    sizes = [INNER, *[CONFIG.num_groups * CONFIG.state_size] * 2]
    x, B, C = randn(tokens, CHANNELS).split(sizes, dim=1)
    groups = (CONFIG.num_groups, -1)
    dt = projected(tokens)[:, -HEADS:]
    return ScanTokens(
        x.unflatten(1, (HEADS, -1)), dt, B.unflatten(1, groups), C.unflatten(1, groups)
    )


def prefill_batch(rows: int, length: int) -> Any:
    """Make the arrays of rows of one length from their beginning; one state is stored.

    Live slots come first, then snapshots, the zero slot and the dummy slot.
    """
    size = CONFIG.scan_chunk_size
    each = length // size
    starts, chunks = torch.arange(rows), torch.arange(rows * each + 1)
    return SimpleNamespace(
        cu_prefill_lens=ints(torch.arange(rows + 1) * length),
        prefill_starts=ints(starts * 0),
        prefill_slot_ids=ints(starts),
        initial_slot_ids=ints(starts * 0 + 2 * rows),
        snapshot_rows=ints(starts),
        snapshot_ends=ints(starts * length + size),
        snapshot_slot_ids=ints(starts + rows),
        cu_scan_chunks=ints(chunks * size),
        scan_chunk_rows=ints(chunks[:-1] // each),
        last_scan_chunks=ints(starts * each + each - 1),
        snapshot_scan_chunks=ints(starts * each),
    )


def _scan_decode(rows: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        shape = HEADS, CONFIG.head_dim, CONFIG.state_size
        states = randn(rows + 2, *shape, dtype=torch.float32)
        batch: Any = SimpleNamespace(decode_slot_ids=ints(torch.randperm(rows)))
        given = scan_tokens(rows), scan_layer(), CONFIG, states, batch
        return lambda: scan.scan_decode(*given)

    return make


def _scan_prefill(rows: int, length: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        shape = HEADS, CONFIG.head_dim, CONFIG.state_size
        states = randn(2 * rows + 2, *shape, dtype=torch.float32)
        batch = prefill_batch(rows, length)
        given = scan_tokens(rows * length), scan_layer(), CONFIG, states, batch
        return lambda: scan.scan_prefill(*given)

    return make


def _conv(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw inputs, filters, biases and windows."""
    inputs = projected(tokens)[:, INNER : INNER + CHANNELS]
    windows = randn(rows + 2, CHANNELS, CONFIG.conv_window)
    return inputs, randn(CHANNELS, CONFIG.conv_width), randn(CHANNELS), windows


def _conv_decode(rows: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        batch: Any = SimpleNamespace(decode_slot_ids=ints(torch.randperm(rows)))
        given = _conv(rows, rows)
        return lambda: conv1d.conv_decode(*given, batch)

    return make


def _conv_prefill(rows: int, length: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        given, batch = _conv(2 * rows, rows * length), prefill_batch(rows, length)
        return lambda: conv1d.conv_prefill(*given, batch)

    return make


def _rms_norm(tokens: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        hidden, weight = randn(tokens, HIDDEN), randn(HIDDEN)
        return lambda: norm.rms_norm(hidden, weight, EPS)

    return make


def _add_rms_norm(tokens: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        given = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
        return lambda: norm.add_rms_norm(*given, EPS)

    return make


def _gated_norm(tokens: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        given = randn(tokens, INNER), projected(tokens)[:, :INNER], randn(INNER)
        return lambda: norm.gated_group_rms_norm(*given, EPS, CONFIG.num_groups)

    return make


def _copy_states(real: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        slots = 8
        shape = HEADS, CONFIG.head_dim, CONFIG.state_size
        caches: Any = SimpleNamespace(
            conv=randn(LAYERS, slots, CHANNELS, CONFIG.conv_window),
            ssm=randn(LAYERS, slots, *shape, dtype=torch.float32),
        )
        targets = ints([slots - 1] * 256)
        targets[:real] = 4 + torch.arange(real)
        sources = ints(torch.arange(256) % 4)
        return lambda: snapshots.copy_states(caches, sources, targets, slots - 1)

    return make
