"""How an engine's memory is shared out, by one stated formula.

    pools    = limit - weights - workspace
    slots    = (max_requests + 2) * bytes_per_slot           live, zero and dummy slots
    snapshot = (pools - slots) * snapshot_fraction           where the model has states
    blocks   = what is left, less one dummy block

``limit`` is ``memory_fraction`` of the device's memory: by default 0.9 of a GPU's, and
on a CPU at most 1 GiB on top of the weights. ``workspace`` is what the largest step
needs besides: two float32 copies of its widest activation for every token, and its
logits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.blocks import num_blocks_for
from lockstep.config import (
    DEFAULT_BLOCK_SIZE,
    SCAN_CHUNK_SIZES,
    EngineConfig,
    ModelConfig,
)
from lockstep.errors import ConfigError
from lockstep.shapes import AllConvStates, AllKvBlocks, AllSsmStates

GIB = 1024**3
DEFAULT_GPU_FRACTION = 0.9
DEFAULT_CPU_LIMIT = GIB


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Sizes:
    """Every size of an engine, settled.

    State slots are numbered: live slots from 0, snapshots, the zero slot from which
    fresh requests start, the dummy slot that padding writes. Blocks are numbered from
    0; the dummy block is last. Zero slot, dummy slot and dummy block are never owned.

    Attributes:
        bytes_per_block: K/V of one block, all attention layers.
        bytes_per_slot: Conv windows and SSM states of one slot, all Mamba layers.
    """

    max_requests: int
    max_tokens_per_step: int
    max_length: int
    block_size: int
    scan_chunk_size: int
    num_blocks: int
    snapshot_slots: int
    bytes_per_block: int
    bytes_per_slot: int

    @property
    def dummy_block(self) -> int:
        """Block that takes writes nobody may read."""
        return self.num_blocks

    @property
    def first_snapshot_slot(self) -> int:
        """Snapshots come right after the live slots."""
        return self.max_requests

    @property
    def zero_slot(self) -> int:
        """Slot that always holds the state before the first token."""
        return self.max_requests + self.snapshot_slots

    @property
    def dummy_slot(self) -> int:
        """Slot that takes states nobody may read."""
        return self.zero_slot + 1

    @property
    def num_slots(self) -> int:
        """All state slots of the pool."""
        return self.dummy_slot + 1

    @property
    def table_blocks(self) -> int:
        """Longest block table."""
        return num_blocks_for(self.max_length, self.block_size)

    def describe(self) -> str:
        """Say in a few lines what fits."""
        return "\n".join(
            (
                f"K/V blocks   {self.num_blocks} x {self.block_size} tokens, "
                f"{_human(self.bytes_per_block)} each",
                f"state slots  {self.max_requests} live + {self.snapshot_slots} "
                f"snapshots + 2 reserved, {_human(self.bytes_per_slot)} each",
                f"a request    up to {self.max_length} tokens; "
                f"{self.max_tokens_per_step} tokens a step",
            )
        )


@dataclass(frozen=True)
class Caches:
    """The two pools: K/V blocks by position, Mamba states by slot.

    Attributes:
        kv: Keys (0) and values (1) of every attention layer.
        conv: Last raw conv inputs of every Mamba layer, oldest first.
        ssm: SSM states of every Mamba layer.
    """

    kv: AllKvBlocks
    conv: AllConvStates
    ssm: AllSsmStates

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """List the pools."""
        return self.kv, self.conv, self.ssm


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    model_dtype: torch.dtype,
    weight_bytes: int,
) -> Sizes:
    """Settle every size of an engine by the formula above.

    Raises:
        ConfigError: Sizes that contradict each other or the model, or a memory limit
            in which nothing fits.
    """
    block_size, scan_chunk = settle_block_size(model, engine)
    max_length = _settle_max_length(model, engine)
    per_block = _bytes_per_block(model, engine, model_dtype, block_size)
    per_slot = _bytes_per_slot(model, engine, model_dtype)
    workspace = _workspace_bytes(model, engine)
    limit = _memory_limit(engine, device, weight_bytes + workspace)
    live = (engine.max_requests + 2) * per_slot
    pools = limit - weight_bytes - workspace - live
    snapshots = _settle_snapshots(engine, pools, per_slot)
    num_blocks = engine.num_blocks
    if num_blocks is None:
        most = engine.max_requests * num_blocks_for(max_length, block_size)
        left = pools - snapshots * per_slot
        num_blocks = min(left // per_block - 1, 2 * most) if per_block else most
    if num_blocks < 1:
        raise ConfigError(
            f"no K/V block fits: the limit is {_human(limit)}, weights take "
            f"{_human(weight_bytes)}, the largest step {_human(workspace)}, "
            f"{engine.max_requests + 2} state slots {_human(live)}, and a block takes "
            f"{_human(per_block)}; lower max_requests or max_tokens_per_step, or raise "
            "memory_fraction"
        )
    return Sizes(
        max_requests=engine.max_requests,
        max_tokens_per_step=engine.max_tokens_per_step,
        max_length=max_length,
        block_size=block_size,
        scan_chunk_size=scan_chunk,
        num_blocks=num_blocks,
        snapshot_slots=snapshots,
        bytes_per_block=per_block,
        bytes_per_slot=per_slot,
    )


def settle_block_size(model: ModelConfig, engine: EngineConfig) -> tuple[int, int]:
    """Return block size and scan chunk, checked against each other."""
    own = model.mamba.scan_chunk_size if model.mamba else DEFAULT_BLOCK_SIZE
    scan_chunk = engine.scan_chunk_size or own
    if model.mamba and scan_chunk not in SCAN_CHUNK_SIZES:
        raise ConfigError(
            f"scan_chunk_size is {scan_chunk}; it must be one of {SCAN_CHUNK_SIZES}"
        )
    block_size = engine.block_size or scan_chunk
    if model.mamba and block_size % scan_chunk:
        raise ConfigError(
            f"block_size {block_size} is not a multiple of the scan chunk "
            f"{scan_chunk}, so no state would be known at its end; use "
            f"{num_blocks_for(block_size, scan_chunk) * scan_chunk}"
        )
    return block_size, scan_chunk


def allocate_caches(
    model: ModelConfig,
    engine: EngineConfig,
    sizes: Sizes,
    model_dtype: torch.dtype,
    device: torch.device,
) -> Caches:
    """Allocate both pools, zeroed, in their one layout."""
    kv_dtype = _kv_dtype(engine, model_dtype)
    attention, mamba = model.attention, model.mamba
    kv_heads, head_dim = (
        (attention.num_kv_heads, attention.head_dim) if attention else (0, 0)
    )
    kv = torch.zeros(
        (2, model.num_attention_layers, sizes.num_blocks + 1, sizes.block_size)
        + (kv_heads, head_dim),
        dtype=kv_dtype,
        device=device,
    )
    layers = (model.num_mamba_layers, sizes.num_slots)
    channels, window = (mamba.conv_channels, mamba.conv_window) if mamba else (0, 0)
    heads, dim, state = (
        (mamba.num_heads, mamba.head_dim, mamba.state_size) if mamba else (0, 0, 0)
    )
    ssm_dtype = torch_dtype(engine.ssm_state_dtype)
    return Caches(
        kv=kv,
        conv=torch.zeros((*layers, channels, window), dtype=kv_dtype, device=device),
        ssm=torch.zeros((*layers, heads, dim, state), dtype=ssm_dtype, device=device),
    )


def warnings_for(model: ModelConfig, engine: EngineConfig, sizes: Sizes) -> list[str]:
    """List features that are on but can do nothing at these sizes."""
    if not engine.prefix_caching:
        return []
    found: list[str] = []
    if model.num_mamba_layers and not sizes.snapshot_slots:
        found.append(
            "prefix caching is on, but there are no snapshot slots: K/V memory is "
            "shared and no token is ever skipped; raise snapshot_slots"
        )
    if sizes.block_size >= sizes.max_length:
        found.append(
            f"prefix caching is on, but a block of {sizes.block_size} tokens is not "
            f"shorter than the longest request ({sizes.max_length}): nothing can be "
            "matched; lower block_size"
        )
    return found


def _kv_dtype(engine: EngineConfig, model_dtype: torch.dtype) -> torch.dtype:
    return model_dtype if engine.kv_dtype == "auto" else torch_dtype(engine.kv_dtype)


def _settle_max_length(model: ModelConfig, engine: EngineConfig) -> int:
    if engine.max_length is None:
        return model.max_positions
    if engine.max_length > model.max_positions:
        raise ConfigError(
            f"max_length is {engine.max_length}; the model was made for "
            f"{model.max_positions} positions"
        )
    return engine.max_length


def _bytes_per_block(
    model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, block_size: int
) -> int:
    if model.attention is None:
        return 0
    values = 2 * model.num_attention_layers * block_size * model.attention.kv_size
    return values * _kv_dtype(engine, dtype).itemsize


def _bytes_per_slot(
    model: ModelConfig, engine: EngineConfig, dtype: torch.dtype
) -> int:
    mamba = model.mamba
    if mamba is None:
        return 0
    conv = mamba.conv_channels * mamba.conv_window * _kv_dtype(engine, dtype).itemsize
    ssm = mamba.inner_size * mamba.state_size
    return model.num_mamba_layers * (
        conv + ssm * torch_dtype(engine.ssm_state_dtype).itemsize
    )


def _workspace_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    widths = [model.hidden_size]
    widths += [model.mamba.in_proj_size] if model.mamba else []
    widths += [model.mlp.size] if model.mlp else []
    widths += (
        [model.moe.shared_size, model.moe.top_k * model.moe.expert_size]
        if (model.moe)
        else []
    )
    tokens = engine.max_tokens_per_step
    rows = tokens if engine.record_logprobs else min(tokens, engine.max_requests)
    return 4 * (2 * tokens * max(widths) + 2 * rows * model.vocab_size)


def _memory_limit(engine: EngineConfig, device: torch.device, needed: int) -> int:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * (engine.memory_fraction or DEFAULT_GPU_FRACTION))
    if engine.memory_fraction is None:
        return needed + DEFAULT_CPU_LIMIT
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * engine.memory_fraction)


def _settle_snapshots(engine: EngineConfig, pools: int, per_slot: int) -> int:
    if engine.snapshot_slots is not None:
        return engine.snapshot_slots
    if not per_slot or not engine.prefix_caching:
        return 0
    return max(0, int(pools * engine.snapshot_fraction) // per_slot)


def _human(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
