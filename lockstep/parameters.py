"""The parameters of a model: their names, shapes, dtypes and grouping.

One layout for both sides. A checkpoint's names are mapped onto the flat names used
here (``layers.3.in_proj.weight``) by `lockstep.families`; `parameter_specs` lists them
all, so that loading, checking and drawing at random read one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

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


Specs = dict[str, ParameterSpec]


def parameter_specs(config: ModelConfig) -> Specs:
    """List every parameter of a model by its flat name."""
    embedding = (config.vocab_size, config.hidden_size)
    specs = _one("embedding", ParameterKind.MATRIX, *embedding)
    layer_specs = {
        MAMBA: _mamba_specs,
        ATTENTION: _attention_specs,
        MLP: _mlp_specs,
        MOE: _moe_specs,
    }
    norm = ParameterSpec((config.hidden_size,), ParameterKind.NORM)
    for index, letter in enumerate(config.layer_pattern):
        layer = {"norm": norm, **layer_specs[letter](config)}
        specs |= {f"layers.{index}.{name}": spec for name, spec in layer.items()}
    specs["final_norm"] = norm
    if not config.tie_embeddings:
        specs |= _one("head", ParameterKind.MATRIX, *embedding)
    return specs


def _one(name: str, kind: ParameterKind, *shape: int) -> Specs:
    return {name: ParameterSpec(shape, kind)}


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Specs:
    weight = _one(f"{name}.weight", ParameterKind.MATRIX, outputs, inputs)
    return weight | (_one(f"{name}.bias", ParameterKind.BIAS, outputs) if bias else {})


def _mamba_specs(config: ModelConfig) -> Specs:
    mamba, kind = config.mamba, ParameterKind
    assert mamba is not None
    hidden, inner, heads = config.hidden_size, mamba.inner_size, mamba.num_heads
    channels, bias = mamba.conv_channels, mamba.proj_bias
    return {
        **_linear("in_proj", mamba.in_proj_size, hidden, bias),
        **_one("conv_weight", kind.MATRIX, channels, mamba.conv_width),
        **(_one("conv_bias", kind.BIAS, channels) if mamba.conv_bias else {}),
        **_one("A", kind.DECAY, heads),
        **_one("dt_bias", kind.TIME_STEP, heads),
        **_one("D", kind.SKIP, heads),
        **_one("gated_norm", kind.NORM, inner),
        **_linear("out_proj", hidden, inner, bias),
    }


def _attention_specs(config: ModelConfig) -> Specs:
    attention = config.attention
    assert attention is not None
    hidden, bias = config.hidden_size, attention.bias
    return {
        **_linear("q_proj", attention.query_size, hidden, bias),
        **_linear("k_proj", attention.kv_size, hidden, bias),
        **_linear("v_proj", attention.kv_size, hidden, bias),
        **_linear("o_proj", hidden, attention.query_size, bias),
    }


def _mlp_specs(config: ModelConfig) -> Specs:
    mlp, hidden = config.mlp, config.hidden_size
    assert mlp is not None
    up = _linear("up_proj", mlp.size, hidden, mlp.bias)
    return up | _linear("down_proj", hidden, mlp.size, mlp.bias)


def _moe_specs(config: ModelConfig) -> Specs:
    moe, kind = config.moe, ParameterKind
    assert moe is not None
    hidden, experts, bias = config.hidden_size, moe.num_experts, moe.bias
    width = moe.latent_size or hidden
    specs = {
        **_one("router", kind.ROUTER, experts, hidden),
        **_one("correction", kind.CORRECTION, experts),
        **_one("experts_up", kind.MATRIX, experts, moe.expert_size, width),
        **_one("experts_down", kind.MATRIX, experts, width, moe.expert_size),
    }
    if moe.shared_size:
        specs |= _linear("shared_up", moe.shared_size, hidden, bias)
        specs |= _linear("shared_down", hidden, moe.shared_size, bias)
    if moe.latent_size:
        specs |= _linear("latent_down", width, hidden, bias)
        specs |= _linear("latent_up", hidden, width, bias)
    return specs


def build_parameters(config: ModelConfig, flat: Mapping[str, Tensor]) -> Parameters:
    """Group flat tensors into `Parameters`.

    Args:
        config: The model.
        flat: One tensor for each name of `parameter_specs`.
    """
    kinds: dict[str, type[LayerParameters]] = {
        MAMBA: MambaParameters,
        ATTENTION: AttentionParameters,
        MLP: MlpParameters,
        MOE: MoeParameters,
    }
    return Parameters(
        embedding=flat["embedding"],
        layers=tuple(
            _group(kinds[letter], flat, f"layers.{index}.")
            for index, letter in enumerate(config.layer_pattern)
        ),
        final_norm=flat["final_norm"],
        head=flat["embedding"] if config.tie_embeddings else flat["head"],
    )


def _group(
    kind: type[LayerParameters], flat: Mapping[str, Tensor], prefix: str
) -> LayerParameters:
    """Fill a layer's fields; those that the model does not have are None."""
    values: dict[str, Any] = {}
    for entry in fields(kind):
        name = prefix + entry.name
        weight = flat.get(f"{name}.weight")
        linear = weight is not None and LinearParameters(
            weight, flat.get(f"{name}.bias")
        )
        values[entry.name] = linear or flat.get(name)
    return kind(**values)
