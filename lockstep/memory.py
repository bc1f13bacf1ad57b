"""How an engine's memory is shared out, by one stated formula.

    pools    = limit - weights - workspace
    slots    = (max_requests + 2) * bytes_per_slot           live, zero and dummy slots
    snapshot = (pools - slots) * snapshot_fraction           where the model has states
    blocks   = what is left, less one dummy block

``limit`` is ``memory_fraction`` of the device's memory: by default 0.9 of a GPU's, and
on a CPU at most 1 GiB on top of the weights. ``workspace`` is what the largest step
needs besides: two float32 copies of the widest thing a layer makes of each token, and
two of its logits, of which a request may ask for all.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.blocks import num_blocks_for
from lockstep.config import EngineConfig, ModelConfig, Sizes, check_at_most
from lockstep.errors import ConfigError
from lockstep.parameters import num_parameters, num_weight_bytes, parameter_specs
from lockstep.plan import BatchShape
from lockstep.policy import graph_shapes
from lockstep.shapes import AllConvStates, AllKvBlocks, AllSsmStates

#: Scan chunks that every tier implements.
SCAN_CHUNK_SIZES = (16, 32, 64, 128, 256)
#: Block size of a model without a scan chunk.
DEFAULT_BLOCK_SIZE = 128
DEFAULT_GPU_FRACTION = 0.9
DEFAULT_CPU_LIMIT = 1024**3


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


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
    model: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype
) -> Sizes:
    """Settle every size of an engine by the formula above.

    Raises:
        ConfigError: Sizes that contradict each other or the model, or a memory limit
            in which nothing fits.
    """
    block_size, scan_chunk = settle_block_size(model, engine)
    max_length = engine.max_length or model.max_positions
    check_at_most("max_length", max_length, model.max_positions, "positions")
    per_block, per_slot = _bytes_each(model, engine, block_size, dtype)
    weights, workspace = num_weight_bytes(model, dtype), _workspace_bytes(model, engine)
    live = (engine.max_requests + 2) * per_slot
    limit = _memory_limit(engine, device, weights + workspace)
    pools = limit - weights - workspace - live
    snapshots = engine.snapshot_slots
    if snapshots is None:
        share = int(pools * engine.snapshot_fraction) if engine.prefix_caching else 0
        snapshots = max(0, share // per_slot) if per_slot else 0
    blocks = engine.num_blocks
    if blocks is None:
        # Without a cache to fill, more than every request at full length is no use.
        most = 2 * engine.max_requests * num_blocks_for(max_length, block_size)
        left = pools - snapshots * per_slot
        # Those of a model without attention take no memory.
        fitting = left // per_block - 1 if per_block else most
        blocks = min(fitting, most) if left >= 0 else 0
    if blocks < 1:
        raise ConfigError(
            f"no K/V block of {_human(per_block)} fits: of {_human(limit)}, weights "
            f"take {_human(weights)}, the largest step {_human(workspace)} and "
            f"{engine.max_requests + 2} state slots {_human(live)}; lower max_requests "
            "or max_tokens_per_step, or raise memory_fraction"
        )
    return Sizes(
        max_requests=engine.max_requests,
        max_tokens_per_step=engine.max_tokens_per_step,
        max_length=max_length,
        block_size=block_size,
        scan_chunk_size=scan_chunk,
        num_blocks=blocks,
        snapshot_slots=snapshots,
        bytes_per_block=per_block,
        bytes_per_slot=per_slot,
        graph_shapes=_graph_shapes(engine),
    )


def _graph_shapes(engine: EngineConfig) -> tuple[BatchShape, ...]:
    """List the shapes to which an engine pads its steps, if it does."""
    if engine.graphs in (None, "off"):
        return ()
    only = engine.graphs == "decode"
    return graph_shapes(engine.max_requests, engine.max_tokens_per_step, only)


def settle_block_size(model: ModelConfig, engine: EngineConfig) -> tuple[int, int]:
    """Return block size and scan chunk, checked against each other."""
    own = model.mamba.scan_chunk_size if model.mamba else DEFAULT_BLOCK_SIZE
    scan_chunk = engine.scan_chunk_size or own
    block_size = engine.block_size or scan_chunk
    if model.mamba and scan_chunk not in SCAN_CHUNK_SIZES:
        raise ConfigError(
            f"scan_chunk_size is {scan_chunk}; it must be one of {SCAN_CHUNK_SIZES}"
        )
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
    kv, conv, ssm = _shapes(model, sizes.block_size)
    kv_dtype, ssm_dtype = _dtypes(engine, model_dtype)
    kv_shape = (*kv[:2], sizes.num_blocks + 1, *kv[2:])
    conv_shape, ssm_shape = ((s[0], sizes.num_slots, *s[1:]) for s in (conv, ssm))
    return Caches(
        kv=torch.zeros(kv_shape, dtype=kv_dtype, device=device),
        conv=torch.zeros(conv_shape, dtype=kv_dtype, device=device),
        ssm=torch.zeros(ssm_shape, dtype=ssm_dtype, device=device),
    )


def describe(
    model: ModelConfig, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> str:
    """Say in a few lines what the model is, where it runs and what fits."""
    millions = num_parameters(model) / 1e6
    blocks = (
        f"{sizes.num_blocks} x {sizes.block_size} tokens, "
        f"{_human(sizes.bytes_per_block)} each"
    )
    slots = (
        f"{sizes.max_requests} live + {sizes.snapshot_slots} snapshots + 2 reserved, "
        f"{_human(sizes.bytes_per_slot)} each"
    )
    if not model.num_attention_layers:
        blocks = f"no memory: no attention; prefixes of {sizes.block_size} tokens"
    if not model.num_mamba_layers:
        slots = "no memory: no Mamba layers"
    return (
        f"{model.family} {model.layer_pattern}, {millions:,.1f}M parameters, "
        f"{str(dtype).removeprefix('torch.')} on {device}\n"
        f"K/V blocks   {blocks}\n"
        f"state slots  {slots}\n"
        f"a request    up to {sizes.max_length} tokens; {sizes.max_tokens_per_step} "
        "tokens a step"
    )


def idle_features(model: ModelConfig, engine: EngineConfig, sizes: Sizes) -> str:
    """Say which feature is on but can do nothing at these sizes; empty for none."""
    if engine.prefix_caching and sizes.block_size >= sizes.max_length:
        return (
            f"prefix caching is on, but a block of {sizes.block_size} tokens is not "
            f"shorter than the longest request ({sizes.max_length}): nothing can be "
            "matched; lower block_size"
        )
    if engine.snapshot_slots and not model.num_mamba_layers:
        return (
            f"there are {engine.snapshot_slots} snapshot slots, but the model has no "
            "Mamba layers, so no state to keep; leave snapshot_slots unset"
        )
    if engine.prefix_caching and model.num_mamba_layers and not sizes.snapshot_slots:
        return (
            "prefix caching is on, but there are no snapshot slots: K/V memory is "
            "shared and no token is ever skipped; raise snapshot_slots"
        )
    return ""


def _shapes(model: ModelConfig, block_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one K/V block and of one slot's conv windows and states."""
    heads, mamba = model.attention, model.mamba
    kv = (heads.num_kv_heads, heads.head_dim) if heads else (0, 0)
    conv = (mamba.conv_channels, mamba.conv_window) if mamba else (0, 0)
    ssm = (mamba.num_heads, mamba.head_dim, mamba.state_size) if mamba else (0, 0, 0)
    blocks = (2, model.num_attention_layers, block_size, *kv)
    return blocks, (model.num_mamba_layers, *conv), (model.num_mamba_layers, *ssm)


def _bytes_each(
    model: ModelConfig, engine: EngineConfig, block_size: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Count the bytes of one K/V block and of one state slot."""
    kv, conv, ssm = map(math.prod, _shapes(model, block_size))
    kv_size, ssm_size = (each.itemsize for each in _dtypes(engine, dtype))
    return kv * kv_size, conv * kv_size + ssm * ssm_size


def _dtypes(engine: EngineConfig, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of K/V blocks and conv windows, and that of SSM states."""
    kv_dtype = own if engine.kv_dtype == "auto" else torch_dtype(engine.kv_dtype)
    return kv_dtype, torch_dtype(engine.ssm_state_dtype)


def _workspace_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    layers = [s for n, s in parameter_specs(model).items() if n.startswith("layers.")]
    widest = max(max(spec.shape) for spec in layers)
    # A request may ask for the log-probabilities of every token of its prompt.
    return 4 * engine.max_tokens_per_step * (2 * widest + 2 * model.vocab_size)


def _memory_limit(engine: EngineConfig, device: torch.device, needed: int) -> int:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * (engine.memory_fraction or DEFAULT_GPU_FRACTION))
    if engine.memory_fraction is None:
        return needed + DEFAULT_CPU_LIMIT
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * engine.memory_fraction)


def _human(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
