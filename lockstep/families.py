"""Checkpoint families: what their configs say and what they call their tensors.

A family is one entry of `FAMILIES`: a function from a Hugging Face config to
`ModelConfig`, and one from `ModelConfig` to the checkpoint names of every parameter.
Configs are read as plain dictionaries, in the spelling in which checkpoints were
published and in that of the ``transformers`` library.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

from lockstep import config as configs
from lockstep.config import ATTENTION, LAYER_PARTS, MAMBA, MLP, MOE, ModelConfig
from lockstep.errors import CheckpointError, ConfigError, UnsupportedModelError
from lockstep.parameters import parameter_specs

T = TypeVar("T")

#: The fields of a Hugging Face config, and what configs call each of ours.
Fields = Mapping[str, Any]
Names = Mapping[str, str]


def as_stored(stored: Tensor) -> Tensor:
    """Return the tensor itself."""
    return stored


def decay_rate(stored: Tensor) -> Tensor:
    """Return ``A``, of which checkpoints store ``log(-A)``."""
    return -torch.exp(stored)


def filter_taps(stored: Tensor) -> Tensor:
    """Drop the middle dimension of a depthwise convolution's weight."""
    return stored.reshape(*stored.shape[:1], -1)


#: Parameters that checkpoints store in another form.
TRANSFORMS = {"A": decay_rate, "conv_weight": filter_taps}


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

    read_config: Callable[[Fields], ModelConfig]
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


def read_model_config(fields: Fields) -> ModelConfig:
    """Make a `ModelConfig` of the fields of a Hugging Face config.

    Raises:
        UnsupportedModelError: A family or an option that is not implemented.
        ConfigError: A field that is missing or cannot work.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    refuse_others(fields, {"quantization_config": ()})
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


def refuse_others(fields: Fields, implemented: Mapping[str, Sequence[object]]) -> None:
    """Refuse options that are set to anything but a value that is implemented."""
    for name, values in implemented.items():
        if name in fields and fields[name] not in values:
            either = "".join(f" or {value!r}" for value in values)
            raise UnsupportedModelError(
                f"{name}={fields[name]!r} is not implemented for model family "
                f"{fields.get('model_type')!r}; it must be unset{either}"
            )


#: How values are brought into the form of a field; others stay as they are.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda name: str(name).removeprefix("torch."),
    "eos_token_ids": lambda ids: (ids,) if isinstance(ids, int) else tuple(ids),
    # `transformers` writes infinity as an object.
    "time_step_limit": lambda limits: tuple(
        float(limit["__float__"] if isinstance(limit, dict) else limit)
        for limit in limits
    ),
}


def fill(
    kind: type[T], names: Names, fields: Fields, prefix: str = "", **values: Any
) -> T:
    """Make a `ModelConfig`, or the shape of one kind of layer, of a config's fields.

    Args:
        kind: The class to make.
        names: For each of its fields, behind the prefix, what configs call it: the
            first name present counts, of those set apart by ``|``. What is absent has
            the default of the class.
        fields: The config.
        prefix: What the class's fields begin with in ``names``.
        values: Fields that are not in ``names``.

    Raises:
        ConfigError: A field that is missing or is not a whole number.
    """
    for entry in dataclasses.fields(cast(Any, kind)):
        if prefix + entry.name not in names:
            continue
        spellings = names[prefix + entry.name].split("|")
        found = next((name for name in spellings if name in fields), None)
        if found is not None:
            value = fields[found]
            if entry.type == "int" and type(value) is not int:
                raise ConfigError(f"{found} is {value!r}; it must be a whole number")
            values[entry.name] = _CONVERSIONS.get(entry.name, lambda x: x)(value)
        elif entry.default is dataclasses.MISSING:
            raise ConfigError(f"the model's config lacks {spellings[0]}")
    return kind(**values)


#: Names of layer types, those of the library and older ones.
_LETTERS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


def _pattern(fields: Fields) -> str:
    """Return the layer pattern; a list of names goes before a string of letters."""
    spellings = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    names: Sequence[str] = next((fields[n] for n in spellings if n in fields), ())
    if not names:
        raise ConfigError(f"the model's config has none of {', '.join(spellings)}")
    unknown = sorted(set(names) - set(_LETTERS) - set(LAYER_PARTS))
    if unknown:
        known = ", ".join(_LETTERS)
        raise UnsupportedModelError(
            f"layer types {unknown} are not implemented; known are {known}"
        )
    pattern = "".join(_LETTERS.get(name, name) for name in names)
    depth = fields.get("num_hidden_layers", len(pattern))
    if depth != len(pattern):
        raise ConfigError(
            f"num_hidden_layers is {depth}, but the layer pattern {pattern!r} has "
            f"{len(pattern)} layers"
        )
    return pattern


# Nemotron-H.

#: What stands for a field that is absent, where `ModelConfig` has no default.
_NEMOTRON_H_DEFAULTS = {"max_position_embeddings": 4096, "head_dim": 128}
#: Options that only these values of are implemented.
_NEMOTRON_H_IMPLEMENTED: dict[str, Sequence[object]] = {
    "sliding_window": (),
    # Without biases in `transformers`, with them in the code first published.
    "attention_bias": (False,),
    "residual_in_fp32": (False,),
    "n_shared_experts": (1,),
    "mamba_hidden_act": ("silu",),
    "mlp_hidden_act": get_args(configs.Activation),
}
#: The config's name of each field of a `ModelConfig` and of its parts.
_NEMOTRON_H_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "layer_norm_epsilon|norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "dtype": "dtype|torch_dtype",
    "eos_token_ids": "eos_token_id",
    "bos_token_id": "bos_token_id",
    "mamba.num_heads": "mamba_num_heads",
    "mamba.head_dim": "mamba_head_dim",
    "mamba.state_size": "ssm_state_size",
    "mamba.num_groups": "mamba_n_groups|n_groups",
    "mamba.conv_width": "mamba_d_conv|conv_kernel",
    "mamba.conv_bias": "mamba_conv_bias|use_conv_bias",
    "mamba.proj_bias": "use_bias",
    "mamba.scan_chunk_size": "mamba_chunk_size|chunk_size",
    "mamba.time_step_limit": "mamba_dt_limit|time_step_limit",
    "attention.num_heads": "num_attention_heads",
    "attention.num_kv_heads": "num_key_value_heads|num_attention_heads",
    "attention.head_dim": "attention_head_dim|head_dim",
    "mlp.size": "intermediate_size",
    "mlp.activation": "mlp_hidden_act",
    "mlp.bias": "mlp_bias",
    "moe.num_experts": "n_routed_experts|num_local_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.expert_size": "moe_intermediate_size",
    "moe.shared_size": "moe_shared_expert_intermediate_size",
    "moe.num_groups": "n_group",
    "moe.top_k_groups": "topk_group",
    "moe.normalize_weights": "norm_topk_prob",
    "moe.scaling": "routed_scaling_factor",
    "moe.latent_size": "moe_latent_size",
    "moe.activation": "mlp_hidden_act",
    "moe.bias": "mlp_bias",
}
#: Where parameters are stored whose names differ from ours, alternatives set apart by
#: ``|``; any other is in its layer's ``mixer`` under its own name.
_NEMOTRON_H_TENSORS = {
    "embedding": "embeddings.weight",
    "final_norm": "norm_f.weight",
    "head": "lm_head.weight",
    "norm": "norm.weight",
    "conv_weight": "mixer.conv1d.weight",
    "conv_bias": "mixer.conv1d.bias",
    "A": "mixer.A_log",
    "gated_norm": "mixer.norm.weight",
    "router": "mixer.gate.weight",
    "correction": "mixer.gate.e_score_correction_bias",
    "experts_up": "mixer.experts.up_proj|mixer.experts.{expert}.up_proj.weight",
    "experts_down": "mixer.experts.down_proj|mixer.experts.{expert}.down_proj.weight",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
    "latent_down": "mixer.fc1_latent_proj",
    "latent_up": "mixer.fc2_latent_proj",
}


def _read_nemotron_h(fields: Fields) -> ModelConfig:
    biases = {"mamba_proj_bias": (False, fields.get("use_bias"))}
    refuse_others(fields, {**_NEMOTRON_H_IMPLEMENTED, **biases})
    if fields.get("num_nextn_predict_layers"):
        warnings.warn("layers for multi-token prediction are left out", stacklevel=2)
    pattern = _pattern(fields)
    fields = {**_NEMOTRON_H_DEFAULTS, **fields}
    settled: dict[str, Any] = {"family": "nemotron_h", "layer_pattern": pattern}
    for letter, part in LAYER_PARTS.items():
        if letter in pattern:
            kind, _ = get_args(get_type_hints(ModelConfig)[part])  # the class, or None
            settled[part] = fill(kind, _NEMOTRON_H_FIELDS, fields, f"{part}.")
    return fill(ModelConfig, _NEMOTRON_H_FIELDS, fields, **settled)


def _nemotron_h_sources(config: ModelConfig) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for name in parameter_specs(config):
        match = re.fullmatch(r"(layers\.\d+\.)?(\w+)(\.\w+)?", name)
        assert match is not None
        layer, base, part = match.groups(default="")
        stored = _NEMOTRON_H_TENSORS.get(base, f"mixer.{base}").split("|")
        names = tuple(layer + form + part for form in stored)
        sources[name] = Source(names, TRANSFORMS.get(base, as_stored))
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
