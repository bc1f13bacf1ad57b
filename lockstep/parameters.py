"""The parameters of a model: their names, shapes, dtypes and grouping.

One layout for both sides. A checkpoint's names are mapped onto the flat names used
here (``layers.3.in_proj.weight``) by `lockstep.families`; `parameter_specs` lists them
all, so that loading, checking and drawing at random read one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep import config as configs
from lockstep import shapes
from lockstep.config import ATTENTION, LAYER_PARTS, MAMBA, MLP, MOE, ModelConfig

#: What a parameter is; decides its dtype and how it is drawn at random.
ParameterKind = Literal[
    "matrix", "norm", "bias", "router", "correction", "decay", "time_step", "skip"
]
#: Kinds held in float32 whatever the model's dtype: they enter float32 arithmetic.
FLOAT32_KINDS = ("router", "correction", "decay", "time_step", "skip")


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

    weight: shapes.Weight
    bias: shapes.Bias | None


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

    norm: shapes.NormWeight
    in_proj: LinearParameters
    conv_weight: shapes.ConvWeight
    conv_bias: shapes.ConvBias | None
    A: shapes.PerMambaHead
    dt_bias: shapes.PerMambaHead
    D: shapes.PerMambaHead
    gated_norm: shapes.NormWeight
    out_proj: LinearParameters


@dataclass(frozen=True)
class AttentionParameters:
    """One attention layer; ``q_norm`` and ``k_norm`` are weights of a head's norm."""

    norm: shapes.NormWeight
    q_proj: LinearParameters
    k_proj: LinearParameters
    v_proj: LinearParameters
    o_proj: LinearParameters
    q_norm: shapes.NormWeight | None
    k_norm: shapes.NormWeight | None


@dataclass(frozen=True)
class MlpParameters:
    """One MLP layer; a gated one has the rows of its gate first in ``up_proj``."""

    norm: shapes.NormWeight
    up_proj: LinearParameters
    down_proj: LinearParameters


@dataclass(frozen=True)
class MoeParameters:
    """One mixture-of-experts layer.

    Attributes:
        norm: Weight of the norm before the layer.
        router: Scores of each expert.
        correction: Added to the scores for the choice, never to the weights.
        experts_up: First matrices of all experts, stacked; in gated ones, here and in
            the shared expert, the rows of the gate come first.
        experts_down: Second matrices of all experts, stacked.
        shared_up: First matrix of the shared expert.
        shared_down: Second matrix of the shared expert.
        latent_down: From the residual stream to the experts' width.
        latent_up: Back from it.
    """

    norm: shapes.NormWeight
    router: shapes.Weight
    correction: shapes.PerExpert | None
    experts_up: shapes.ExpertsUp
    experts_down: shapes.ExpertsDown
    shared_up: LinearParameters | None
    shared_down: LinearParameters | None
    latent_down: LinearParameters | None
    latent_up: LinearParameters | None


LayerParameters = MambaParameters | AttentionParameters | MlpParameters | MoeParameters


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model; ``head`` is the embedding where they are tied."""

    embedding: shapes.Weight
    layers: tuple[LayerParameters, ...]
    final_norm: shapes.NormWeight
    head: shapes.Weight


Specs = dict[str, ParameterSpec]


def parameter_specs(config: ModelConfig) -> Specs:
    """List every parameter of a model by its flat name."""
    embedding = ParameterSpec((config.vocab_size, config.hidden_size), "matrix")
    norm = ParameterSpec((config.hidden_size,), "norm")
    specs = {"embedding": embedding}
    for index, letter in enumerate(config.layer_pattern):
        shape = getattr(config, LAYER_PARTS[letter])
        layer = {"norm": norm, **_LAYERS[letter][1](config.hidden_size, shape)}
        specs |= {f"layers.{index}.{name}": spec for name, spec in layer.items()}
    specs["final_norm"] = norm
    return specs if config.tie_embeddings else {**specs, "head": embedding}


def num_parameters(config: ModelConfig) -> int:
    """Count a model's parameters, those of tied matrices once."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(config).values())


def num_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Count the bytes that a model's parameters take."""
    specs = parameter_specs(config).values()
    return sum(math.prod(spec.shape) * spec.dtype(dtype).itemsize for spec in specs)


def make_parameters(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    fill: Callable[[Tensor, str, ParameterKind], object],
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> Parameters:
    """Make every parameter of a model, straight in its dtype and on its device.

    Args:
        config: The model.
        dtype: The model's dtype.
        device: Where parameters are to be.
        fill: Writes a parameter, given its tensor, flat name and kind.
        progress: Wraps the names as they are worked off, to show how far it is.
    """
    flat: dict[str, Tensor] = {}
    specs = parameter_specs(config)
    for name in progress([*specs]):
        spec = specs[name]
        flat[name] = torch.empty(spec.shape, dtype=spec.dtype(dtype), device=device)
        fill(flat[name], name, spec.kind)
    layers = tuple(
        _group(_LAYERS[letter][0], flat, f"layers.{index}.")
        for index, letter in enumerate(config.layer_pattern)
    )
    embedding = flat["embedding"]
    return Parameters(
        embedding, layers, flat["final_norm"], flat.get("head", embedding)
    )


def _group(
    kind: type[LayerParameters], flat: Mapping[str, Tensor], prefix: str
) -> LayerParameters:
    """Fill a layer's fields; those that the model does not have are None."""
    values: dict[str, Any] = {}
    for entry in fields(kind):
        name = prefix + entry.name
        values[entry.name] = flat.get(name)
        if f"{name}.weight" in flat:
            weight, bias = flat[f"{name}.weight"], flat.get(f"{name}.bias")
            values[entry.name] = LinearParameters(weight, bias)
    return kind(**values)


def _one(name: str, kind: ParameterKind, *shape: int) -> Specs:
    return {name: ParameterSpec(shape, kind)}


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Specs:
    weight = _one(f"{name}.weight", "matrix", outputs, inputs)
    return weight | (_one(f"{name}.bias", "bias", outputs) if bias else {})


def _rows(size: int, gated: bool) -> int:
    """Count the rows of the first matrix of an MLP or an expert."""
    return 2 * size if gated else size


def _mamba_specs(hidden: int, mamba: configs.MambaConfig) -> Specs:
    channels, heads, bias = mamba.conv_channels, mamba.num_heads, mamba.proj_bias
    inner = mamba.inner_size
    return {
        **_linear("in_proj", inner + channels + heads, hidden, bias),
        **_one("conv_weight", "matrix", channels, mamba.conv_width),
        **(_one("conv_bias", "bias", channels) if mamba.conv_bias else {}),
        **_one("A", "decay", heads),
        **_one("dt_bias", "time_step", heads),
        **_one("D", "skip", heads),
        **_one("gated_norm", "norm", inner),
        **_linear("out_proj", hidden, inner, bias),
    }


def _attention_specs(hidden: int, attention: configs.AttentionConfig) -> Specs:
    bias, query_size = attention.bias, attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    norms = ("q_norm", "k_norm") if attention.qk_norm else ()
    return {
        **_linear("q_proj", query_size, hidden, bias),
        **_linear("k_proj", kv_size, hidden, bias),
        **_linear("v_proj", kv_size, hidden, bias),
        **_linear("o_proj", hidden, query_size, bias),
        **{name: ParameterSpec((attention.head_dim,), "norm") for name in norms},
    }


def _mlp_specs(hidden: int, mlp: configs.MlpConfig) -> Specs:
    up = _linear("up_proj", _rows(mlp.size, mlp.gated), hidden, mlp.bias)
    return up | _linear("down_proj", hidden, mlp.size, mlp.bias)


def _moe_specs(hidden: int, moe: configs.MoeConfig) -> Specs:
    width, rows = moe.latent_size or hidden, _rows(moe.expert_size, moe.gated)
    specs = {
        **_one("router", "router", moe.num_experts, hidden),
        **_one("experts_up", "matrix", moe.num_experts, rows, width),
        **_one("experts_down", "matrix", moe.num_experts, width, moe.expert_size),
    }
    if moe.scoring == "sigmoid":
        specs |= _one("correction", "correction", moe.num_experts)
    if moe.shared_size:
        rows = _rows(moe.shared_size, moe.gated)
        specs |= _linear("shared_up", rows, hidden, moe.bias)
        specs |= _linear("shared_down", hidden, moe.shared_size, moe.bias)
    if moe.latent_size:
        specs |= _linear("latent_down", width, hidden, moe.bias)
        specs |= _linear("latent_up", hidden, width, moe.bias)
    return specs


#: For each letter of a layer pattern, how its parameters are grouped, and their specs.
_LAYERS: dict[str, tuple[type[LayerParameters], Callable[[int, Any], Specs]]] = {
    MAMBA: (MambaParameters, _mamba_specs),
    ATTENTION: (AttentionParameters, _attention_specs),
    MLP: (MlpParameters, _mlp_specs),
    MOE: (MoeParameters, _moe_specs),
}
