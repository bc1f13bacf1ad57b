"""Small models, parameters, pools and batches, built directly and at random."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, Draws, ScanTokens
from lockstep.blocks import num_blocks_for
from lockstep.config import (
    AttentionConfig,
    EngineConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    Sizes,
)
from lockstep.memory import Caches, allocate_caches, plan_memory, torch_dtype
from lockstep.parameters import (
    ParameterKind,
    Parameters,
    make_parameters,
)
from lockstep.plan import BatchShape

CPU = torch.device("cpu")
#: Where tests run; `tests/conftest.py` sets torch's default.
DEVICE = torch.get_default_device()

#: Sizes are odd on purpose: rows of these widths begin at every possible alignment.
MAMBA = MambaConfig(
    num_heads=4, head_dim=5, state_size=7, num_groups=2, scan_chunk_size=16
)
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6)
MLP = MlpConfig(size=21)
MOE = MoeConfig(num_experts=6, top_k=2, expert_size=10, shared_size=11)
LATENT_MOE = MoeConfig(
    num_experts=8,
    top_k=2,
    expert_size=10,
    num_groups=4,
    top_k_groups=2,
    scaling=2.5,
    latent_size=9,
    shared_size=11,
)
SOFTMAX_MOE = replace(MOE, scoring="softmax", activation="silu", gated=True)
#: A rotary encoding of whole heads, and a stretched one of four channels of six.
ROTARY = RotaryConfig(theta=100.0)
PART_ROTARY = RotaryConfig(
    theta=50.0, part=0.7, kind="llama3", factor=4.0, original_positions=24
)
_BASE = ModelConfig(
    family="tiny",
    layer_pattern="M*-E",
    vocab_size=61,
    hidden_size=19,
    max_positions=256,
    mamba=MAMBA,
    attention=ATTENTION,
    mlp=MLP,
    moe=MOE,
)
_MODELS = {
    "hybrid": replace(_BASE, layer_pattern="M*M-EM*E"),
    "mamba": replace(_BASE, layer_pattern="MM"),
    "attention": replace(_BASE, layer_pattern="*-*"),
    "mlp": replace(_BASE, layer_pattern="-"),
    "latent": replace(_BASE, layer_pattern="ME*E", moe=LATENT_MOE),
    "tied": replace(_BASE, layer_pattern="M-", tie_embeddings=True),
    "biased": replace(
        _BASE,
        mamba=replace(MAMBA, conv_bias=False, proj_bias=True),
        attention=replace(ATTENTION, bias=True, scale=0.3),
        mlp=replace(MLP, bias=True, activation="gelu"),
        moe=replace(MOE, bias=True, activation="silu", shared_size=0),
    ),
    "turned": replace(
        _BASE,
        layer_pattern="*-*-",
        attention=replace(ATTENTION, rotary=ROTARY, qk_norm=True),
        mlp=replace(MLP, activation="silu", gated=True, bias=True),
    ),
    "scaled": replace(
        _BASE,
        layer_pattern="ME*E",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logit_divisor=0.8,
        attention=replace(ATTENTION, rotary=PART_ROTARY, scale=0.3),
        moe=SOFTMAX_MOE,
    ),
    "wide stream": replace(
        _BASE, layer_pattern="MM", dtype="bfloat16", float32_residual=True
    ),
    "bf16": replace(_BASE, layer_pattern="M*M-E", dtype="bfloat16"),
    "float64": replace(_BASE, layer_pattern="M*M-E", dtype="float64"),
}
MODEL_NAMES = tuple(_MODELS)


def model_config(name: str = "hybrid") -> ModelConfig:
    """Return a tiny model by name."""
    return _MODELS[name]


def generator(seed: int) -> torch.Generator:
    """Return a random generator of its own, the same on every device."""
    return torch.Generator("cpu").manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers, the same in every dtype up to rounding."""
    return _normal(shape, generator(seed)).to(DEVICE, dtype)


def _normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")


def random_parameters(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype | None = None
) -> Parameters:
    """Draw parameters at a scale that keeps activations near one."""
    dtype = dtype or torch_dtype(config.dtype)
    source = generator(seed)

    def fill(parameter: Tensor, _name: str, kind: ParameterKind) -> None:
        parameter.copy_(_scaled(_normal(tuple(parameter.shape), source), kind))

    return make_parameters(config, dtype, DEVICE, fill)


def _scaled(values: Tensor, kind: ParameterKind) -> Tensor:
    if kind in ("matrix", "router"):
        return values / math.sqrt(values.shape[-1])
    if kind == "decay":
        return -torch.exp(values)
    if kind in ("norm", "skip"):
        return 1 + values / 4
    return values / 4


def plan_sizes(config: ModelConfig, engine: EngineConfig | None = None) -> Sizes:
    """Settle the sizes of a small engine."""
    return plan_memory(config, engine or ENGINE, DEVICE, torch_dtype(config.dtype))


#: A small engine: four live slots, six snapshots, 24 blocks of 16.
ENGINE = EngineConfig(
    max_requests=4,
    max_tokens_per_step=256,
    block_size=16,
    scan_chunk_size=16,
    num_blocks=24,
    snapshot_slots=6,
)


def fresh_caches(
    config: ModelConfig, engine: EngineConfig | None = None, poison: bool = True
) -> Caches:
    """Allocate pools; all but the zero slot holds NaN where nothing was written."""
    sizes = plan_sizes(config, engine)
    dtype = torch_dtype(config.dtype)
    caches = allocate_caches(config, engine or ENGINE, sizes, dtype, DEVICE)
    if poison:
        for pool in caches.tensors():
            pool.fill_(torch.nan)
        caches.conv[:, sizes.zero_slot] = 0
        caches.ssm[:, sizes.zero_slot] = 0
    return caches


@dataclass
class Row:
    """One row of a batch, with absolute positions.

    Attributes:
        start: Position of the first token.
        tokens: The tokens computed.
        slot: Live slot.
        initial_slot: Slot that the row starts from; its own when None.
        blocks: Block ids of positions 0 onwards.
        snapshots: Positions whose state is stored, with slots. A decode row stores at
            most one, after its token.
    """

    start: int
    tokens: list[int]
    slot: int
    initial_slot: int | None = None
    blocks: list[int] = field(default_factory=list[int])
    snapshots: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)


def make_batch(
    sizes: Sizes,
    decodes: list[Row] | None = None,
    prefills: list[Row] | None = None,
) -> BatchMetadata:
    """Build the arrays of a batch from its rows; logits are wanted of every token."""
    decodes, prefills = decodes or [], prefills or []
    rows = decodes + prefills
    tokens = [token for row in rows for token in row.tokens]
    positions = [p for row in rows for p in range(row.start, row.end)]
    starts = _cumulate([len(row.tokens) for row in prefills])
    snapshots = [
        (index, starts[index] + position - row.start, slot)
        for index, row in enumerate(prefills)
        for position, slot in row.snapshots
    ]
    shape = BatchShape(len(tokens), len(prefills), len(decodes))
    everything = _ints(range(len(tokens)))
    return BatchMetadata(
        shape=shape,
        padded_shape=shape,
        num_snapshots=len(snapshots),
        num_logits=len(tokens),
        num_samples=len(tokens),
        token_ids=_ints(tokens),
        positions=_ints(positions),
        token_mask=torch.ones(len(tokens), dtype=torch.bool),
        kv_index=_ints(i for row in rows for i in _kv_index(row, sizes)),
        block_tables=_block_tables(rows, sizes),
        context_lens=_ints(row.end for row in rows),
        decode_slot_ids=_ints(row.slot for row in decodes),
        decode_snapshot_slot_ids=_ints(
            row.snapshots[0][1] if row.snapshots else sizes.dummy_slot
            for row in decodes
        ),
        cu_prefill_lens=_ints(starts),
        prefill_starts=_ints(row.start for row in prefills),
        prefill_slot_ids=_ints(row.slot for row in prefills),
        initial_slot_ids=_ints(
            row.slot if row.initial_slot is None else row.initial_slot
            for row in prefills
        ),
        snapshot_rows=_ints(row for row, _, _ in snapshots),
        snapshot_ends=_ints(end for _, end, _ in snapshots),
        snapshot_slot_ids=_ints(slot for _, _, slot in snapshots),
        **_scan_chunks(prefills, starts, snapshots, sizes.scan_chunk_size),
        logit_index=everything,
        sample_index=everything,
        draws=make_draws(len(tokens), positions=[p + 1 for p in positions]),
    )


def make_draws(count: int, **entries: Any) -> Draws:
    """Describe draws, greedy ones unless told otherwise; a single value is of all.

    Args:
        count: How many.
        entries: Fields of `Draws`; ``banned_ids`` is a list of lists.
    """
    banned = entries.pop("banned_ids", None) or [[]] * count
    width = max(map(len, banned), default=0)
    filled = [[*ids, *[-1] * (width - len(ids))] for ids in banned]
    settled: dict[str, Any] = {"top_ps": 1.0} | entries
    dtypes = {"temperatures": torch.float32, "top_ps": torch.float64}
    dtypes["min_ps"] = torch.float64

    def column(name: str) -> Tensor:
        value = settled.get(name, 0)
        values = value if isinstance(value, list) else [value] * count
        return torch.tensor(values, dtype=dtypes.get(name, torch.int64))

    columns = [column(name) for name in Draws._fields[:-1]]
    ids = _ints(token for row in filled for token in row)
    return Draws(*columns, banned_ids=ids.view(count, width))


def _scan_chunks(
    prefills: list[Row],
    starts: list[int],
    snapshots: list[tuple[int, int, int]],
    scan_chunk: int,
) -> dict[str, Tensor]:
    """Cut prefill rows at absolute multiples of the scan chunk and at their ends."""
    ends: list[int] = []
    chunk_rows: list[int] = []
    for index, row in enumerate(prefills):
        first = row.start // scan_chunk * scan_chunk + scan_chunk
        cuts = [*range(first, row.end, scan_chunk), row.end]
        ends += [starts[index] + cut - row.start for cut in cuts]
        chunk_rows += [index] * len(cuts)
    last = [
        len(chunk_rows) - 1 - chunk_rows[::-1].index(r)
        for r in range(len(starts))
        if r in chunk_rows
    ]
    return {
        "cu_scan_chunks": _ints([0, *ends]),
        "scan_chunk_rows": _ints(chunk_rows),
        "last_scan_chunks": _ints(last),
        "snapshot_scan_chunks": _ints(
            ends.index(end) if end in ends else -1 for _, end, _ in snapshots
        ),
    }


def _kv_index(row: Row, sizes: Sizes) -> list[int]:
    if not row.blocks:
        return [sizes.dummy_block * sizes.block_size] * len(row.tokens)
    where = (divmod(p, sizes.block_size) for p in range(row.start, row.end))
    return [row.blocks[block] * sizes.block_size + offset for block, offset in where]


def _block_tables(rows: list[Row], sizes: Sizes) -> Tensor:
    width = num_blocks_for(sizes.max_length, sizes.block_size)
    tables = torch.full((len(rows), width), sizes.dummy_block, dtype=torch.int64)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = _ints(row.blocks)
    return tables


def _cumulate(lens: list[int]) -> list[int]:
    return [sum(lens[:index]) for index in range(len(lens) + 1)]


def _ints(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)  # type: ignore[call-overload]


def load(side: str, module: str) -> ModuleType:
    """Import a side's module."""
    return importlib.import_module(f"lockstep.{side}.{module}")


def at_alignment(values: Tensor, offset: int) -> Tensor:
    """Copy a tensor to memory that begins ``offset`` values past an aligned address."""
    memory = torch.zeros(values.numel() + offset, dtype=values.dtype)
    memory[offset:] = values.flatten()
    return memory[offset:].view(values.shape)


def scan_tokens(
    config: MambaConfig, count: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> ScanTokens:
    """Draw tokens for a scan."""
    groups = (count, config.num_groups, config.state_size)
    return ScanTokens(
        x=randn(count, config.num_heads, config.head_dim, seed=seed, dtype=dtype),
        dt=randn(count, config.num_heads, seed=seed + 1, dtype=dtype),
        B=randn(*groups, seed=seed + 2, dtype=dtype),
        C=randn(*groups, seed=seed + 3, dtype=dtype),
    )


def take(tokens: ScanTokens, start: int, end: int) -> ScanTokens:
    """Take a range of tokens."""
    return ScanTokens(*(part[start:end] for part in tokens))


def join(pieces: list[ScanTokens]) -> ScanTokens:
    """Put tokens one after another."""
    return ScanTokens(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def dummies(count: int) -> list[int]:
    """Token ids for tests in which they do not matter."""
    return [0] * count
