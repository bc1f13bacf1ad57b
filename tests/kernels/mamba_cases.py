"""Every configuration of the Mamba side's kernels, as calls on tensors of no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.batch import ScanTokens
from lockstep.config import MambaConfig
from lockstep.memory import SCAN_CHUNK_SIZES

#: Of the published model with 30 billion parameters, and its width; of a dense hybrid.
NANO3 = MambaConfig(num_heads=64, head_dim=64, state_size=128, num_groups=8)
HIDDEN = 2688
DENSE4B, DENSE_HIDDEN = replace(NANO3, num_heads=112), 3072
#: Channels of a head, state columns and scan chunk of models whose heads are wide.
WIDE = (
    *((64, 512, 64), (80, 200, 64), (128, 256, 64), (128, 256, 128), (128, 256, 256)),
    *((256, 128, 128), (256, 256, 128)),
)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SLOTS = 34
#: Whose kernels these are.
MODULES = ("conv1d", "norm", "scan", "snapshots")


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor that has a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def batch(rows: int = 8, chunks: int = 20, snapshots: int = 24) -> Any:
    """Make the arrays of a batch that kernels of the Mamba side read."""
    by_row = dict.fromkeys(
        ("decode_slot_ids", "prefill_starts", "prefill_slot_ids", "initial_slot_ids"),
        empty(rows),
    )
    by_snapshot = dict.fromkeys(
        ("snapshot_rows", "snapshot_ends", "snapshot_slot_ids", "snapshot_scan_chunks"),
        empty(snapshots),
    )
    return SimpleNamespace(
        **by_row,
        **by_snapshot,
        last_scan_chunks=empty(rows),
        cu_prefill_lens=empty(rows + 1),
        cu_scan_chunks=empty(chunks + 1),
        scan_chunk_rows=empty(chunks),
    )


def layer(config: MambaConfig, wide: torch.dtype) -> Any:
    """Make the parameters that a scan reads."""
    heads = empty(config.num_heads, dtype=wide)
    return SimpleNamespace(A=heads, dt_bias=heads, D=heads)


def tokens(config: MambaConfig, count: int, dtype: torch.dtype) -> ScanTokens:
    """Make views of wider rows, as a model does."""
    projected = empty(count, config.inner_size + config.conv_channels + 64, dtype=dtype)
    convolved = empty(count, config.conv_channels, dtype=dtype)
    states = config.num_groups * config.state_size
    x, B, C = convolved.split([config.inner_size, states, states], dim=1)
    return ScanTokens(
        x.unflatten(1, (config.num_heads, -1)),
        projected[:, -config.num_heads :],
        B.unflatten(1, (config.num_groups, -1)),
        C.unflatten(1, (config.num_groups, -1)),
    )


def cases() -> dict[str, Callable[[], Any]]:
    """Name a call for each configuration."""
    found: dict[str, Callable[[], Any]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        calls = _of(dtype, NANO3, HIDDEN, SCAN_CHUNK_SIZES)
        found |= {f"{key} {name}": call for key, call in calls.items()}
        for sizes in WIDE if dtype != torch.float64 else ():
            key = f"wide {'/'.join(map(str, sizes))} {name}"
            found[key] = _scan(dtype, *sizes)
    sizes = (DENSE4B.scan_chunk_size,)
    calls = _of(torch.bfloat16, DENSE4B, DENSE_HIDDEN, sizes)
    return found | {f"{key} dense bfloat16": call for key, call in calls.items()}


def _scan(
    dtype: torch.dtype, head_dim: int, state_size: int, chunk: int
) -> Callable[[], Any]:
    """Scan prompts of a model with heads of some width."""
    from lockstep.optimized.kernels import scan

    config = MambaConfig(8, head_dim, state_size, 1, scan_chunk_size=chunk)
    states = empty(SLOTS, 8, head_dim, state_size, dtype=torch.float32)
    given = tokens(config, 8, dtype), layer(config, torch.float32)
    return lambda: scan.scan_prefill(*given, config, states, batch())


def _of(
    dtype: torch.dtype, config: MambaConfig, width: int, sizes: Sequence[int]
) -> dict[str, Callable[[], Any]]:
    """Name calls on one dtype and one model, with some scan chunks."""
    from lockstep.optimized.kernels import conv1d, norm, scan, snapshots

    wide = torch.promote_types(dtype, torch.float32)
    channels, heads = config.conv_channels, config.num_heads
    states = empty(SLOTS, heads, config.head_dim, config.state_size, dtype=wide)
    windows = empty(SLOTS, channels, config.conv_window, dtype=dtype)
    filters = empty(channels, 4, dtype=dtype), empty(channels, dtype=dtype)
    hidden, weight = empty(8, width, dtype=dtype), empty(width, dtype=dtype)
    inner, gain = (
        empty(*shape, config.inner_size, dtype=dtype) for shape in ((8,), ())
    )
    inputs = empty(8, channels + 64, dtype=dtype)[:, :channels]
    bare = inputs, filters[0], None, windows, batch()
    caches: Any = SimpleNamespace(conv=windows[None], ssm=states[None])
    scanned = tokens(config, 8, dtype), layer(config, wide)
    found = {
        "rms_norm": lambda: norm.rms_norm(hidden, weight, 1e-5),
        "add_rms_norm": lambda: norm.add_rms_norm(hidden, hidden, weight, 1e-5),
        "gated": lambda: norm.gated_group_rms_norm(inner, inner, gain, 1e-5, 8),
        "conv_decode": lambda: conv1d.conv_decode(inputs, *filters, windows, batch()),
        "conv_decode of one": lambda: conv1d.conv_decode(
            inputs[:1], *filters, windows, batch(1)
        ),
        "conv_prefill": lambda: conv1d.conv_prefill(inputs, *filters, windows, batch()),
        "conv_decode without bias": lambda: conv1d.conv_decode(*bare),
        "conv_prefill without bias": lambda: conv1d.conv_prefill(*bare),
        "copy_states": lambda: snapshots.copy_states(caches, empty(8), empty(8), 33),
        "scan_decode": lambda: scan.scan_decode(*scanned, config, states, batch()),
    }
    for size in sizes:
        sized = *scanned, replace(config, scan_chunk_size=size), states
        for name, chunks in (("few", 2), ("some", 8), ("many", 20)):
            given = *sized, batch(chunks=chunks)
            found[f"scan_prefill {size} {name}"] = lambda given=given: (
                scan.scan_prefill(*given)
            )
    return found
