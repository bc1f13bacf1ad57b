"""Checkpoint families: what their configs say and what they call their tensors.

A family is one entry of `FAMILIES`: a function from a Hugging Face config to
`ModelConfig`, and one from `ModelConfig` to the checkpoint names of every parameter.
Configs are read as plain dictionaries, in the spelling in which checkpoints were
published and in that of the ``transformers`` library.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.config import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from lockstep.errors import CheckpointError, ConfigError, UnsupportedModelError
from lockstep.parameters import parameter_specs


def as_stored(stored: Tensor) -> Tensor:
    """Return the tensor itself."""
    return stored


def decay_rate(stored: Tensor) -> Tensor:
    """Return ``A``, of which checkpoints store ``log(-A)``."""
    return -torch.exp(stored)


def filter_taps(stored: Tensor) -> Tensor:
    """Drop the middle dimension of a depthwise convolution's weight."""
    return stored.reshape(*stored.shape[:1], -1)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint keeps one parameter.

    Attributes:
        names: Names that its tensor may have, less the family's prefix. One with
            ``{expert}`` stands for a tensor an expert, to be stacked.
        transform: From the stored tensor, or one expert's, to the parameter.
    """

    names: tuple[str, ...]
    transform: Callable[[Tensor], Tensor] = as_stored


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
        read_config: Makes a `ModelConfig` of the config's fields.
        sources: Lists the source of every parameter, by flat name.
        prefixes: Prefixes that tensor names may carry, all meaning the same.
        ignored: Beginnings of names of tensors that are left out on purpose.
    """

    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    sources: Callable[[ModelConfig], dict[str, Source]]
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def family_of(model_type: object) -> Family:
    """Find a family by the config's ``model_type``.

    Raises:
        UnsupportedModelError: A family that is not implemented.
    """
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            f"model family {model_type!r} is not implemented; supported are "
            f"{', '.join(FAMILIES)}"
        )
    return family


def read_model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Make a `ModelConfig` of the fields of a Hugging Face config.

    Raises:
        UnsupportedModelError: A family or an option that is not implemented.
        ConfigError: A field that is missing or cannot work.
    """
    _Fields(fields).refuse("quantization_config")
    return family_of(fields.get("model_type")).read_config(fields)


def read_config_files(folder: Path) -> dict[str, Any]:
    """Read a checkpoint folder's config; its generation config names the end tokens.

    Raises:
        CheckpointError: A file that is missing or is not a JSON object.
    """
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return fields if eos is None else fields | {"eos_token_id": eos}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say which file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return cast(dict[str, Any], content)


class _Fields:
    """A config's fields, asked for by any of their spellings."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first field that is set, or the default."""
        values = (self.fields.get(name) for name in names)
        return next((value for value in values if value is not None), default)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a whole number; without a default, it must be there."""
        value = self.get(*names, default=default)
        if value is None:
            raise ConfigError(f"the model's config lacks {names[0]}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{names[0]} is {value!r}; it must be a whole number")
        return value

    def refuse(self, name: str, *harmless: object) -> None:
        """Refuse an option unless it is unset or has a value that changes nothing."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedModelError(
                f"{name}={value!r} is not implemented for model family "
                f"{self.get('model_type')!r}"
            )

    def choice(self, name: str, *known: str) -> Any:
        """Return a field that must be one of a few; the first is the default."""
        value = self.get(name, default=known[0])
        if value not in known:
            raise UnsupportedModelError(
                f"{name}={value!r} is not implemented; known are {', '.join(known)}"
            )
        return value


_ACTIVATIONS = ("relu2", "silu", "gelu")

#: Names of layer types, those of the library and older ones.
_LETTERS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


def _pattern(fields: _Fields) -> str:
    """Return the layer pattern; a list of names goes before a string of letters."""
    spellings = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    names: Sequence[str] = fields.get(*spellings, default=())
    if not names:
        raise ConfigError(f"the model's config has none of {', '.join(spellings)}")
    unknown = sorted(set(names) - set(_LETTERS) - set(_LETTERS.values()))
    if unknown:
        raise UnsupportedModelError(
            f"layer types {unknown} are not implemented; known are "
            f"{', '.join(_LETTERS)}"
        )
    pattern = "".join(_LETTERS.get(name, name) for name in names)
    depth = fields.size("num_hidden_layers", default=len(pattern))
    if depth != len(pattern):
        raise ConfigError(
            f"num_hidden_layers is {depth}, but the layer pattern {pattern!r} has "
            f"{len(pattern)} layers"
        )
    return pattern


def _read_nemotron_h(config: Mapping[str, Any]) -> ModelConfig:
    fields = _Fields(config)
    pattern = _pattern(fields)
    fields.refuse("sliding_window")
    # Without biases in `transformers`, with them in the code first published.
    fields.refuse("attention_bias", False)
    fields.refuse("residual_in_fp32", False)
    fields.refuse("mamba_proj_bias", False, fields.get("use_bias"))
    if fields.size("num_nextn_predict_layers", default=0) > 0:
        warnings.warn("layers for multi-token prediction are left out", stacklevel=2)
    eos = fields.get("eos_token_id", default=[])
    dtype = fields.get("dtype", "torch_dtype", default="float32")
    return ModelConfig(
        family="nemotron_h",
        layer_pattern=pattern,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        max_positions=fields.size("max_position_embeddings", default=4096),
        norm_eps=float(fields.get("layer_norm_epsilon", "norm_eps", default=1e-5)),
        tie_embeddings=bool(fields.get("tie_word_embeddings", default=False)),
        dtype=cast(Any, str(dtype).removeprefix("torch.")),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        bos_token_id=fields.get("bos_token_id"),
        mamba=_nemotron_h_mamba(fields) if MAMBA in pattern else None,
        attention=_nemotron_h_attention(fields) if ATTENTION in pattern else None,
        mlp=_nemotron_h_mlp(fields) if MLP in pattern else None,
        moe=_nemotron_h_moe(fields) if MOE in pattern else None,
    )


def _nemotron_h_mamba(fields: _Fields) -> MambaConfig:
    fields.choice("mamba_hidden_act", "silu")
    limits = fields.get("mamba_dt_limit", "time_step_limit", default=(0.0, math.inf))
    # `transformers` writes infinity as an object.
    low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in limits)
    return MambaConfig(
        num_heads=fields.size("mamba_num_heads"),
        head_dim=fields.size("mamba_head_dim"),
        state_size=fields.size("ssm_state_size"),
        num_groups=fields.size("mamba_n_groups", "n_groups"),
        conv_width=fields.size("mamba_d_conv", "conv_kernel", default=4),
        conv_bias=bool(fields.get("mamba_conv_bias", "use_conv_bias", default=True)),
        proj_bias=bool(fields.get("use_bias", default=False)),
        scan_chunk_size=fields.size("mamba_chunk_size", "chunk_size", default=128),
        time_step_limit=(low, high),
    )


def _nemotron_h_attention(fields: _Fields) -> AttentionConfig:
    heads = fields.size("num_attention_heads")
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", default=heads),
        head_dim=fields.size("head_dim", "attention_head_dim", default=128),
    )


def _nemotron_h_mlp(fields: _Fields) -> MlpConfig:
    return MlpConfig(
        size=fields.size("intermediate_size"),
        activation=fields.choice("mlp_hidden_act", *_ACTIVATIONS),
        bias=bool(fields.get("mlp_bias", default=False)),
    )


def _nemotron_h_moe(fields: _Fields) -> MoeConfig:
    fields.refuse("n_shared_experts", 1)
    return MoeConfig(
        num_experts=fields.size("n_routed_experts", "num_local_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_size=fields.size("moe_intermediate_size"),
        shared_size=fields.size("moe_shared_expert_intermediate_size"),
        num_groups=fields.size("n_group", default=1),
        top_k_groups=fields.size("topk_group", default=1),
        normalize_weights=bool(fields.get("norm_topk_prob", default=True)),
        scaling=float(fields.get("routed_scaling_factor", default=1.0)),
        latent_size=fields.get("moe_latent_size"),
        activation=fields.choice("mlp_hidden_act", *_ACTIVATIONS),
        bias=bool(fields.get("mlp_bias", default=False)),
    )


#: Parameters of Mamba-2 layers, named alike in every family.
MAMBA_NAMES = {
    "in_proj": "in_proj",
    "conv_weight": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "A": "A_log",
    "dt_bias": "dt_bias",
    "D": "D",
    "gated_norm": "norm.weight",
    "out_proj": "out_proj",
}
#: Parameters that checkpoints store in another form.
TRANSFORMS = {"A": decay_rate, "conv_weight": filter_taps}

_NEMOTRON_H_NAMES = {
    MAMBA: MAMBA_NAMES,
    ATTENTION: {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    MLP: {name: name for name in ("up_proj", "down_proj")},
    MOE: {
        "router": "gate.weight",
        "correction": "gate.e_score_correction_bias",
        "experts_up": "experts.up_proj|experts.{expert}.up_proj.weight",
        "experts_down": "experts.down_proj|experts.{expert}.down_proj.weight",
        "shared_up": "shared_experts.up_proj",
        "shared_down": "shared_experts.down_proj",
        "latent_down": "fc1_latent_proj",
        "latent_up": "fc2_latent_proj",
    },
}


def layer_source(prefix: str, names: Mapping[str, str], leaf: str) -> Source:
    """Look a layer's parameter up in a table of names.

    Args:
        prefix: Where the layer's tensors are.
        names: From parameter names, less ``.weight`` and ``.bias``, to stored ones;
            alternatives are set apart by ``|``.
        leaf: The parameter's name within its layer.
    """
    base, dot, part = leaf.partition(".")
    stored = tuple(prefix + name + dot + part for name in names[base].split("|"))
    return Source(stored, TRANSFORMS.get(base, as_stored))


def _nemotron_h_sources(config: ModelConfig) -> dict[str, Source]:
    sources = {
        "embedding": Source(("embeddings.weight",)),
        "final_norm": Source(("norm_f.weight",)),
        "head": Source(("lm_head.weight",)),
    }
    for name in parameter_specs(config):
        if name.startswith("layers."):
            _, index, leaf = name.split(".", 2)
            names = _NEMOTRON_H_NAMES[config.layer_pattern[int(index)]]
            layer = f"layers.{index}."
            sources[name] = (
                Source((layer + "norm.weight",))
                if leaf == "norm"
                else layer_source(layer + "mixer.", names, leaf)
            )
    return sources


#: Every family that is implemented, by the config's ``model_type``.
FAMILIES = {
    "nemotron_h": Family(
        read_config=_read_nemotron_h,
        sources=_nemotron_h_sources,
        prefixes=("backbone.", "model."),
        ignored=("mtp.",),
    )
}
