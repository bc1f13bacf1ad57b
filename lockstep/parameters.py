"""The parameters of a model: their names, shapes, dtypes and grouping.

One layout for both sides. A checkpoint's names are mapped onto the flat names used
here (``layers.3.in_proj.weight``) by `lockstep.families`; `parameter_specs` lists them
all, so that loading, checking and drawing at random read one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from lockstep.config import ATTENTION, MAMBA, MLP, MOE, ModelConfig
from lockstep.shapes import (
    Bias,
    ConvBias,
    ConvWeight,
    ExpertsDown,
    ExpertsUp,
    NormWeight,
    PerExpert,
    PerMambaHead,
    Weight,
)


class ParameterKind(StrEnum):
    """What a parameter is; decides its dtype and how it is drawn at random."""

    MATRIX = "matrix"
    NORM = "norm"
    BIAS = "bias"
    ROUTER = "router"
    CORRECTION = "correction"
    DECAY = "decay"
    TIME_STEP = "time_step"
    SKIP = "skip"


#: Kinds held in float32 whatever the model's dtype: they enter float32 arithmetic.
FLOAT32_KINDS = frozenset(
    {
        ParameterKind.ROUTER,
        ParameterKind.CORRECTION,
        ParameterKind.DECAY,
        ParameterKind.TIME_STEP,
        ParameterKind.SKIP,
    }
)


@dataclass(frozen=True)
class ParameterSpec:
    """Shape and kind of one parameter."""

    shape: tuple[int, ...]
    kind: ParameterKind

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the parameter is held."""
        wide = model_dtype if model_dtype == torch.float64 else torch.float32
        return wide if self.kind in FLOAT32_KINDS else model_dtype


@dataclass(frozen=True)
class LinearParameters:
    """A matrix product, with or without a bias."""

    weight: Weight
    bias: Bias | None


@dataclass(frozen=True)
class MambaParameters:
    """One Mamba-2 layer; letters as in the paper.

    Attributes:
        norm: Weight of the norm before the layer.
        in_proj: To gate, conv channels (x, B, C) and time steps, in this order.
        conv_weight: One filter a channel; the last tap meets the newest token.
        conv_bias: One bias a channel.
        A: Decay rate, per head; negative. Checkpoints store ``log(-A)``.
        dt_bias: Added to the time step before the softplus, per head.
        D: Skip from x to y, per head.
        gated_norm: Weight of the norm after the gate.
        out_proj: Back to the residual stream.
    """

    norm: NormWeight
    in_proj: LinearParameters
    conv_weight: ConvWeight
    conv_bias: ConvBias | None
    A: PerMambaHead
    dt_bias: PerMambaHead
    D: PerMambaHead
    gated_norm: NormWeight
    out_proj: LinearParameters


@dataclass(frozen=True)
class AttentionParameters:
    """One attention layer."""

    norm: NormWeight
    q_proj: LinearParameters
    k_proj: LinearParameters
    v_proj: LinearParameters
    o_proj: LinearParameters


@dataclass(frozen=True)
class MlpParameters:
    """One MLP layer."""

    norm: NormWeight
    up_proj: LinearParameters
    down_proj: LinearParameters


@dataclass(frozen=True)
class MoeParameters:
    """One mixture-of-experts layer.

    Attributes:
        norm: Weight of the norm before the layer.
        router: Scores of each expert.
        correction: Added to the scores for the choice, never to the weights.
        experts_up: First matrices of all experts, stacked.
        experts_down: Second matrices of all experts, stacked.
        shared_up: First matrix of the shared expert.
        shared_down: Second matrix of the shared expert.
        latent_down: From the residual stream to the experts' width.
        latent_up: Back from it.
    """

    norm: NormWeight
    router: Weight
    correction: PerExpert
    experts_up: ExpertsUp
    experts_down: ExpertsDown
    shared_up: LinearParameters | None
    shared_down: LinearParameters | None
    latent_down: LinearParameters | None
    latent_up: LinearParameters | None


LayerParameters = MambaParameters | AttentionParameters | MlpParameters | MoeParameters


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model; ``head`` is the embedding where they are tied."""

    embedding: Weight
    layers: tuple[LayerParameters, ...]
    final_norm: NormWeight
    head: Weight

    @property
    def num_parameters(self) -> int:
        """Count the parameters, those of tied matrices once."""
        return sum(tensor.numel() for tensor in self._unique_tensors())

    @property
    def num_bytes(self) -> int:
        """Count the bytes the parameters take."""
        return sum(t.numel() * t.element_size() for t in self._unique_tensors())

    def _unique_tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        pending: list[object] = [self]
        while pending:
            item = pending.pop()
            if isinstance(item, Tensor):
                found[item.data_ptr()] = item
            elif isinstance(item, tuple):
                pending.extend(item)  # type: ignore[arg-type]
            elif item is not None:
                pending.extend(vars(item).values())
        return list(found.values())


def parameter_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """List every parameter of a model by its flat name."""
    matrix, norm = ParameterKind.MATRIX, ParameterKind.NORM
    hidden = config.hidden_size
    specs = {"embedding": ParameterSpec((config.vocab_size, hidden), matrix)}
    layer_specs = {
        MAMBA: _mamba_specs,
        ATTENTION: _attention_specs,
        MLP: _mlp_specs,
        MOE: _moe_specs,
    }
    for index, letter in enumerate(config.layer_pattern):
        layer = {"norm": ParameterSpec((hidden,), norm), **layer_specs[letter](config)}
        specs |= {f"layers.{index}.{name}": spec for name, spec in layer.items()}
    specs["final_norm"] = ParameterSpec((hidden,), norm)
    if not config.tie_embeddings:
        specs["head"] = ParameterSpec((config.vocab_size, hidden), matrix)
    return specs


def _linear_specs(
    name: str, outputs: int, inputs: int, bias: bool
) -> dict[str, ParameterSpec]:
    weight = ParameterSpec((outputs, inputs), ParameterKind.MATRIX)
    specs = {f"{name}.weight": weight}
    if bias:
        specs[f"{name}.bias"] = ParameterSpec((outputs,), ParameterKind.BIAS)
    return specs


def _mamba_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    mamba = config.mamba
    assert mamba is not None
    hidden, heads = config.hidden_size, (mamba.num_heads,)
    channels = mamba.conv_channels
    specs = _linear_specs("in_proj", mamba.in_proj_size, hidden, mamba.proj_bias)
    specs["conv_weight"] = ParameterSpec(
        (channels, mamba.conv_width), ParameterKind.MATRIX
    )
    if mamba.conv_bias:
        specs["conv_bias"] = ParameterSpec((channels,), ParameterKind.BIAS)
    specs["A"] = ParameterSpec(heads, ParameterKind.DECAY)
    specs["dt_bias"] = ParameterSpec(heads, ParameterKind.TIME_STEP)
    specs["D"] = ParameterSpec(heads, ParameterKind.SKIP)
    specs["gated_norm"] = ParameterSpec((mamba.inner_size,), ParameterKind.NORM)
    return specs | _linear_specs("out_proj", hidden, mamba.inner_size, mamba.proj_bias)


def _attention_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    attention = config.attention
    assert attention is not None
    hidden, bias = config.hidden_size, attention.bias
    return (
        _linear_specs("q_proj", attention.query_size, hidden, bias)
        | _linear_specs("k_proj", attention.kv_size, hidden, bias)
        | _linear_specs("v_proj", attention.kv_size, hidden, bias)
        | _linear_specs("o_proj", hidden, attention.query_size, bias)
    )


def _mlp_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    mlp = config.mlp
    assert mlp is not None
    hidden = config.hidden_size
    return _linear_specs("up_proj", mlp.size, hidden, mlp.bias) | _linear_specs(
        "down_proj", hidden, mlp.size, mlp.bias
    )


def _moe_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    moe = config.moe
    assert moe is not None
    hidden, experts = config.hidden_size, moe.num_experts
    width = moe.latent_size or hidden
    matrix = ParameterKind.MATRIX
    specs = {
        "router": ParameterSpec((experts, hidden), ParameterKind.ROUTER),
        "correction": ParameterSpec((experts,), ParameterKind.CORRECTION),
        "experts_up": ParameterSpec((experts, moe.expert_size, width), matrix),
        "experts_down": ParameterSpec((experts, width, moe.expert_size), matrix),
    }
    if moe.shared_size:
        specs |= _linear_specs("shared_up", moe.shared_size, hidden, moe.bias)
        specs |= _linear_specs("shared_down", hidden, moe.shared_size, moe.bias)
    if moe.latent_size:
        specs |= _linear_specs("latent_down", width, hidden, moe.bias)
        specs |= _linear_specs("latent_up", hidden, width, moe.bias)
    return specs


def build_parameters(config: ModelConfig, flat: Mapping[str, Tensor]) -> Parameters:
    """Group flat tensors into `Parameters`.

    Args:
        config: The model.
        flat: One tensor for each name of `parameter_specs`.
    """
    builders = {MAMBA: _mamba, ATTENTION: _attention, MLP: _mlp, MOE: _moe}
    layers = tuple(
        builders[letter](flat, f"layers.{index}.")
        for index, letter in enumerate(config.layer_pattern)
    )
    return Parameters(
        embedding=flat["embedding"],
        layers=layers,
        final_norm=flat["final_norm"],
        head=flat["embedding"] if config.tie_embeddings else flat["head"],
    )


def _linear(flat: Mapping[str, Tensor], name: str) -> LinearParameters:
    return LinearParameters(flat[f"{name}.weight"], flat.get(f"{name}.bias"))


def _optional_linear(flat: Mapping[str, Tensor], name: str) -> LinearParameters | None:
    return _linear(flat, name) if f"{name}.weight" in flat else None


def _mamba(flat: Mapping[str, Tensor], prefix: str) -> MambaParameters:
    return MambaParameters(
        norm=flat[prefix + "norm"],
        in_proj=_linear(flat, prefix + "in_proj"),
        conv_weight=flat[prefix + "conv_weight"],
        conv_bias=flat.get(prefix + "conv_bias"),
        A=flat[prefix + "A"],
        dt_bias=flat[prefix + "dt_bias"],
        D=flat[prefix + "D"],
        gated_norm=flat[prefix + "gated_norm"],
        out_proj=_linear(flat, prefix + "out_proj"),
    )


def _attention(flat: Mapping[str, Tensor], prefix: str) -> AttentionParameters:
    return AttentionParameters(
        norm=flat[prefix + "norm"],
        q_proj=_linear(flat, prefix + "q_proj"),
        k_proj=_linear(flat, prefix + "k_proj"),
        v_proj=_linear(flat, prefix + "v_proj"),
        o_proj=_linear(flat, prefix + "o_proj"),
    )


def _mlp(flat: Mapping[str, Tensor], prefix: str) -> MlpParameters:
    return MlpParameters(
        norm=flat[prefix + "norm"],
        up_proj=_linear(flat, prefix + "up_proj"),
        down_proj=_linear(flat, prefix + "down_proj"),
    )


def _moe(flat: Mapping[str, Tensor], prefix: str) -> MoeParameters:
    return MoeParameters(
        norm=flat[prefix + "norm"],
        router=flat[prefix + "router"],
        correction=flat[prefix + "correction"],
        experts_up=flat[prefix + "experts_up"],
        experts_down=flat[prefix + "experts_down"],
        shared_up=_optional_linear(flat, prefix + "shared_up"),
        shared_down=_optional_linear(flat, prefix + "shared_down"),
        latent_down=_optional_linear(flat, prefix + "latent_down"),
        latent_up=_optional_linear(flat, prefix + "latent_up"),
    )
