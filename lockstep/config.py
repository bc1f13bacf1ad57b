"""What a model is, how an engine runs it, and the sizes that follow.

All are frozen and checked when made; each bad value has its own message. Sizes that
follow from others are properties and are never written back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from lockstep.errors import ConfigError
from lockstep.plan import BatchShape

#: Letters of a layer pattern, and the field of `ModelConfig` with each one's shape.
MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
LAYER_PARTS = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", MOE: "moe"}

DTypeName = Literal["float32", "bfloat16", "float16", "float64"]
Activation = Literal["relu2", "silu", "gelu"]
RotaryKind = Literal["default", "linear", "llama3"]
Scoring = Literal["sigmoid", "softmax"]
Eviction = Literal["lru", "ref_zero"]
DebugCheck = Literal["integrity", "poison", "checksums"]
GraphMode = Literal["off", "padded", "decode", "all"]
KernelSet = Literal["auto", "torch", "triton", "mamba-ssm"]

#: Whole numbers that may be zero, and the least values of all that do not begin at one.
ZERO_IDS = ("bos_token_id", "eos_token_ids", "seed")
ZERO_COUNTS = ("shared_size", "snapshot_slots", "logprobs")
LEAST = {"conv_width": 2, **dict.fromkeys(ZERO_IDS + ZERO_COUNTS, 0)}
#: Options that users of other engines may look for, and what they ask for.
NOT_OFFERED = {
    "speculative_model": "speculative decoding",
    "speculative_config": "speculative decoding",
    "num_speculative_tokens": "speculative decoding",
    "cpu_offload_gb": "offloading",
    "swap_space": "offloading",
    "num_nextn_predict_layers": "multi-token prediction",
    "tensor_parallel_size": "tensor parallelism",
    "pipeline_parallel_size": "pipeline stages",
    "quantization": "quantization",
}


@dataclass(frozen=True)
class MambaConfig:
    """Shape of the Mamba-2 layers.

    Attributes:
        num_heads: Heads of the recurrence.
        head_dim: Channels of a head.
        state_size: State per channel.
        num_groups: Groups of heads that share B and C; of channels in the gated norm.
        conv_width: Taps of the causal convolution.
        conv_bias: Whether the convolution has a bias.
        proj_bias: Whether the input and output projections have biases.
        scan_chunk_size: The checkpoint's scan chunk, in tokens.
        time_step_limit: Range to which time steps are clamped after the softplus.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    scan_chunk_size: int = 128
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)
        _check_division("Mamba heads", self.num_heads, "groups", self.num_groups)
        low, high = self.time_step_limit
        if not low < high:
            raise ConfigError(f"time_step_limit {self.time_step_limit} is empty")

    @property
    def inner_size(self) -> int:
        """Channels of the recurrence, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that pass the convolution: x, then B, then C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def conv_window(self) -> int:
        """Raw inputs that later tokens still need."""
        return self.conv_width - 1


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position encoding: how fast each pair of channels turns.

    Attributes:
        theta: Base of the wavelengths.
        part: Share of each head that is turned, from its first channel on.
        kind: ``default``; ``linear``, with every frequency divided by ``factor``; or
            ``llama3``, with the low ones divided by it and those between passed over
            smoothly.
        factor: How much longer the context is than at first.
        low_factor: Wavelengths longer than ``original_positions`` over this are low
            frequencies (``llama3``).
        high_factor: Wavelengths shorter than ``original_positions`` over this are high
            frequencies, which stay (``llama3``).
        original_positions: Longest sequence at first (``llama3``).
    """

    theta: float = 10000.0
    part: float = 1.0
    kind: RotaryKind = "default"
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)
        for name in ("theta", "part", "factor", "low_factor"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be above 0"
                )
        if self.part > 1:
            raise ConfigError(f"part is {self.part}; a head has no more than all of it")
        if self.high_factor <= self.low_factor:
            raise ConfigError(
                f"high_factor is {self.high_factor}; it must be above low_factor "
                f"({self.low_factor})"
            )

    def size(self, head_dim: int) -> int:
        """Channels of a head that are turned."""
        return int(head_dim * self.part)


@dataclass(frozen=True)
class AttentionConfig:
    """Shape of the attention layers.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Width of a head.
        bias: Whether the projections have biases.
        scale: Factor on the scores.
        qk_norm: Whether each head of queries and keys is normed.
        rotary: Position encoding; None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    scale: float | None = None
    qk_norm: bool = False
    rotary: RotaryConfig | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)
        _check_division("query heads", self.num_heads, "K/V heads", self.num_kv_heads)
        size = self.rotary.size(self.head_dim) if self.rotary else 2
        if size % 2 or not size:
            raise ConfigError(f"{size} channels of a head cannot be turned in pairs")

    @property
    def score_scale(self) -> float:
        """Factor on the scores: ``scale``, by default ``head_dim ** -0.5``."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class MlpConfig:
    """Shape of the MLP layers: up, activation, down.

    Attributes:
        size: Inner width.
        activation: Function between the two matrices.
        bias: Whether the projections have biases.
        gated: Whether the activation is that of a gate, and multiplies what goes up.
    """

    size: int
    activation: Activation = "relu2"
    bias: bool = False
    gated: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)


@dataclass(frozen=True)
class MoeConfig:
    """Shape and routing of the mixture-of-experts layers.

    Attributes:
        num_experts: Routed experts.
        top_k: Experts that each token visits.
        expert_size: Inner width of a routed expert.
        shared_size: Inner width of the shared expert; 0 for none.
        num_groups: Groups of experts for group-limited routing.
        top_k_groups: Groups from which the experts may come.
        scoring: ``sigmoid`` scores each expert by itself and has a correction that
            steers the choice; ``softmax`` weighs the chosen against each other.
        normalize_weights: Whether the chosen weights are scaled to a sum of one.
        scaling: Factor on the weights.
        latent_size: Width in which the routed experts work; None for the model's.
        activation: Activation of every expert.
        bias: Whether shared expert and latent projections have biases.
        gated: Whether every expert is gated, as in `MlpConfig`.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int
    num_groups: int = 1
    top_k_groups: int = 1
    scoring: Scoring = "sigmoid"
    normalize_weights: bool = True
    scaling: float = 1.0
    latent_size: int | None = None
    activation: Activation = "relu2"
    bias: bool = False
    gated: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)
        _check_division("experts", self.num_experts, "groups", self.num_groups)
        check_at_most("top_k_groups", self.top_k_groups, self.num_groups, "groups")
        eligible = self.num_experts // self.num_groups * self.top_k_groups
        check_at_most("top_k", self.top_k, eligible, "eligible experts")
        if self.scoring == "softmax" and not self.normalize_weights:
            raise ConfigError("softmax weights have a sum of one: normalize_weights")
        if self.num_groups > 1 and self.num_experts < 2 * self.num_groups:
            raise ConfigError(
                "a group is scored by its two best experts, so it needs two; "
                f"{self.num_experts} experts in {self.num_groups} groups have fewer"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid language model as a pattern of layers plus their shapes.

    Attributes:
        family: Name of the checkpoint family, for messages.
        layer_pattern: One letter a layer: ``M`` Mamba-2, ``*`` attention, ``-`` MLP,
            ``E`` mixture of experts.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        max_positions: Longest sequence the model was made for.
        norm_eps: Added to the mean square in every norm.
        tie_embeddings: Whether the head is the embedding.
        embedding_multiplier: Factor on the embedding.
        residual_multiplier: Factor on what each layer adds to the residual stream.
        logit_divisor: What the logits are divided by.
        float32_residual: Whether the residual stream is float32 in a narrower model.
        dtype: The checkpoint's dtype.
        eos_token_ids: Tokens that end a generation.
        bos_token_id: Token that begins a text; None for none.
        mamba: Shape of the ``M`` layers; None without any.
        attention: Shape of the ``*`` layers; None without any.
        mlp: Shape of the ``-`` layers; None without any.
        moe: Shape of the ``E`` layers; None without any.
    """

    family: str
    layer_pattern: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    float32_residual: bool = False
    dtype: DTypeName = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mamba: MambaConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        """Check every field, and that each letter of the pattern has its shape."""
        check_fields(self)
        unknown = sorted(set(self.layer_pattern) - set(LAYER_PARTS))
        if unknown or not self.layer_pattern:
            raise ConfigError(
                f"layer pattern {self.layer_pattern!r} has unknown letters {unknown}; "
                f"known are {''.join(LAYER_PARTS)}"
            )
        for letter, part in LAYER_PARTS.items():
            if letter in self.layer_pattern and getattr(self, part) is None:
                raise ConfigError(
                    f"layer pattern {self.layer_pattern!r} has {letter!r} layers, but "
                    f"their shape ({part}) is missing"
                )

    @property
    def num_mamba_layers(self) -> int:
        """Layers that need a state slot."""
        return self.layer_pattern.count(MAMBA)

    @property
    def num_attention_layers(self) -> int:
        """Layers that need K/V blocks."""
        return self.layer_pattern.count(ATTENTION)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model: budgets, cache, dtypes and checks.

    None means that the value follows from the model or from the memory at hand;
    `lockstep.memory.plan_memory` says how.

    Attributes:
        max_requests: Requests that may run at once; each owns a live state slot.
        max_tokens_per_step: Tokens computed in one step, over all rows.
        max_length: Longest prompt plus output, in tokens; the model's unless set.
        block_size: Tokens in a K/V block; a multiple of the scan chunk, which is the
            default (128 in a model without one).
        scan_chunk_size: Tokens in a scan chunk; the model's unless set.
        num_blocks: K/V blocks; what fits unless set.
        snapshot_slots: State slots for snapshots; what fits unless set.
        memory_fraction: Share of the device's memory that may be used; 0.9 of a GPU's
            and at most 1 GiB of a CPU's unless set.
        snapshot_fraction: Share of the pool memory that goes to snapshots.
        prefix_caching: Whether finished work is kept for prompts that repeat it.
        eviction: ``lru`` keeps unused blocks until room is needed; ``ref_zero`` drops
            them when their last request ends.
        ssm_state_dtype: Dtype of the SSM states.
        kv_dtype: Dtype of K/V blocks and conv windows; the model's when ``auto``.
        record_logprobs: Whether step records hold the log-probabilities of every
            position computed.
        debug: Checks after every step: ``integrity`` of the bookkeeping, ``poison`` in
            freed memory, ``checksums`` of shared blocks and snapshots.
        graphs: Which steps the optimized backend runs at padded shapes from fixed
            buffers: none (``off``), all of them eagerly (``padded``), as CUDA graphs
            those that only decode (``decode``) or ``all``; the last on a GPU unless
            set.
        kernels: Kernel set of the optimized backend: ``torch``, ``triton``,
            ``mamba-ssm``, which is Triton with the Mamba layers of the packages
            ``mamba_ssm`` and ``causal_conv1d`` and graphs of decode steps alone, or
            ``auto``, which is Triton on a GPU.
        side_stream: Whether the optimized backend computes shared experts beside the
            routed ones, on a stream of their own.
    """

    max_requests: int = 64
    max_tokens_per_step: int = 2048
    max_length: int | None = None
    block_size: int | None = None
    scan_chunk_size: int | None = None
    num_blocks: int | None = None
    snapshot_slots: int | None = None
    memory_fraction: float | None = None
    snapshot_fraction: float = 0.5
    prefix_caching: bool = True
    eviction: Eviction = "lru"
    ssm_state_dtype: DTypeName = "float32"
    kv_dtype: DTypeName | Literal["auto"] = "auto"
    record_logprobs: bool = False
    debug: tuple[DebugCheck, ...] = ()
    graphs: GraphMode | None = None
    kernels: KernelSet | None = None
    side_stream: bool | None = None

    def __post_init__(self) -> None:
        """Check every field that can be judged without a model."""
        if isinstance(self.debug, str):
            raise ConfigError(f"debug is a tuple of checks, such as ({self.debug!r},)")
        for name in ("ssm_state_dtype", "kv_dtype"):
            value = getattr(self, name)
            if "8" in str(value):
                raise ConfigError(f"{name} is {value!r}; 8-bit caches are not offered")
        check_fields(self)
        for name, least in (("memory_fraction", 1e-6), ("snapshot_fraction", 0.0)):
            value = getattr(self, name)
            if value is not None and not least <= value <= 1:
                raise ConfigError(f"{name} is {value}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Sizes:
    """Every size of an engine, settled.

    State slots are numbered: live slots from 0, snapshots, the zero slot from which
    fresh requests start, the dummy slot that padding writes. Blocks are numbered from
    0; the dummy block is last. Zero slot, dummy slot and dummy block are never owned.

    Attributes:
        bytes_per_block: K/V of one block, all attention layers.
        bytes_per_slot: Conv windows and SSM states of one slot, all Mamba layers.
        graph_shapes: Shapes to which steps are padded, ascending; none on the
            reference side.
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
    graph_shapes: tuple[BatchShape, ...] = ()

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


def engine_options(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    """Set options by name on top of a configuration.

    Raises:
        ConfigError: A name that is unknown or not offered, or a bad value.

    >>> engine_options(EngineConfig(), {"max_requests": 2}).max_requests
    2
    """
    known = [entry.name for entry in fields(EngineConfig)]
    for name in options:
        if name in NOT_OFFERED:
            raise ConfigError(f"{name}: {NOT_OFFERED[name]} is not offered")
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are {', '.join(known)}")
    return replace(config, **options)


def check_at_most(name: str, value: int, most: int, what: str) -> None:
    """Refuse a number of which the model has fewer."""
    if value > most:
        raise ConfigError(f"{name} is {value}; the model has only {most} {what}")


def _check_division(what: str, number: int, shares: str, among: int) -> None:
    """Refuse a number that cannot be shared out evenly."""
    if number % among:
        raise ConfigError(
            f"{number} {what} cannot be shared out among {among} {shares}"
        )


def check_fields(config: Any, error: type[Exception] = ConfigError) -> None:
    """Hold every field to its type: choices, switches, and whole numbers to `LEAST`."""
    hints = get_type_hints(type(config))
    for entry in fields(config):
        name, value = entry.name, getattr(config, entry.name)
        allowed, least = _leaves(hints[name]), LEAST.get(name, 1)
        choices = [each for each in allowed if isinstance(each, str)]
        values: Any = value if isinstance(value, tuple) else (value,)
        if value is None and NoneType in allowed:
            continue
        for each in values:
            if choices and each not in choices:
                raise error(f"{name} is {each!r}; known are {', '.join(choices)}")
            if bool in allowed and not isinstance(each, bool):
                raise error(f"{name} is {each!r}; it must be True or False")
            if int in allowed and type(each) is not int:
                raise error(f"{name} is {each!r}; it must be an integer")
            if float in allowed and type(each) not in (int, float):
                raise error(f"{name} is {each!r}; it must be a number")
            if int in allowed and each < least:
                raise error(f"{name} is {each}; it must be at least {least}")


def _leaves(hint: Any) -> list[Any]:
    """List the types and literal values that a type hint is made of."""
    parts = get_args(hint)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [hint]
