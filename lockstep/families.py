"""Checkpoint families: what their configs say and what they call their tensors.

A family is a table of ``families.toml``. Configs are read as plain dictionaries, in the
spelling in which checkpoints were published and in that of the ``transformers``
library.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

from lockstep.config import (
    ATTENTION,
    LAYER_PARTS,
    MLP,
    MOE,
    ModelConfig,
    RotaryConfig,
)
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    LockstepError,
    UnsupportedModelError,
)
from lockstep.parameters import parameter_specs

T = TypeVar("T")

#: The fields of a Hugging Face config.
Fields = Mapping[str, Any]


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
            ``{expert}`` stands for a tensor an expert, to be stacked; names joined by
            ``+`` for tensors whose rows follow each other.
        transform: From the stored tensor, or one of several, to the parameter.
    """

    names: tuple[str, ...]
    transform: Callable[[Tensor], Tensor] = as_stored


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: a table of ``families.toml``, which says what is what."""

    prefixes: list[str]
    ignored: list[str]
    mixer: str
    first: str
    second: str
    layers: dict[str, str]
    defaults: dict[str, Any]
    implemented: dict[str, list[Any]]
    fields: dict[str, dict[str, Any]]
    tensors: dict[str, list[str]]

    def sources(self, config: ModelConfig) -> dict[str, Source]:
        """List the source of every parameter, by flat name."""
        sources: dict[str, Source] = {}
        for name in parameter_specs(config):
            match = re.fullmatch(r"(?:layers\.(\d+)\.)?(\w+)(\.\w+)?", name)
            assert match is not None
            index, base, part = match.groups(default="")
            key, layer = base, ""
            if index:
                number, is_second = divmod(int(index), 2 if self.second else 1)
                layer = f"layers.{number}."
                key = "second_norm" if is_second and base == "norm" else base
            forms = self.tensors.get(key, [self.mixer + base])
            names = tuple(
                "+".join(layer + tensor + part for tensor in form.split("+"))
                for form in forms
            )
            sources[name] = Source(names, TRANSFORMS.get(base, as_stored))
        return sources


_TABLES = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
#: Every family that is implemented, by the config's ``model_type``.
FAMILIES = {name: Family(**table) for name, table in tomllib.loads(_TABLES).items()}


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
    family = family_of(fields.get("model_type"))
    try:
        return _read(family, fields)
    except LockstepError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        # A list where a number should be, and the like.
        raise ConfigError(f"a field of this config cannot be used: {error}") from error


def _read(family: Family, fields: Fields) -> ModelConfig:
    """Make a `ModelConfig` of a family's fields."""
    fields = _flatten(fields)
    for name, values in family.implemented.items():
        if name in fields and fields[name] not in values:
            either = "".join(f" or {value!r}" for value in values)
            raise UnsupportedModelError(
                f"{name}={fields[name]!r} is not implemented for model family "
                f"{fields['model_type']!r}; it must be unset{either}"
            )
    if fields.get("num_nextn_predict_layers"):
        warnings.warn("layers for multi-token prediction are left out", stacklevel=3)
    fields = {**family.defaults, **fields}
    pattern = _pattern(family, fields)
    settled = {"family": fields["model_type"], "layer_pattern": pattern}
    for letter, part in LAYER_PARTS.items():
        if letter in pattern:
            kind, _ = get_args(get_type_hints(ModelConfig)[part])  # the class, or None
            names, values = family.fields[part], {}
            if part == "attention" and fields["position_embedding_type"] == "rope":
                rotary = _fill(RotaryConfig, family.fields["rotary"], fields)
                values = {"rotary": rotary}
            settled[part] = _fill(kind, names, fields, **values)
    return _fill(ModelConfig, family.fields["model"], fields, **settled)


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
        advice = "name a folder as save_pretrained or a download leaves it"
        raise CheckpointError(f"{path} does not exist; {advice}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return cast(dict[str, Any], content)


def _flatten(fields: Fields) -> dict[str, Any]:
    """Leave out what is unset; give what is said of rotary names of its own.

    That is a table in a config, under one of two names, whose entries become
    ``rope.factor`` and so on.
    """
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise UnsupportedModelError(
            f"rope_parameters={rope!r} is not implemented; it must be one table for "
            "all layers"
        )
    flat = {**fields, **{f"rope.{name}": value for name, value in rope.items()}}
    if "rope.type" in flat:
        flat.setdefault("rope.rope_type", flat["rope.type"])
    return {name: value for name, value in flat.items() if value not in (None, "auto")}


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


def _fill(kind: type[T], names: Mapping[str, Any], fields: Fields, **values: Any) -> T:
    """Make a `ModelConfig`, or the shape of one kind of layer, of a config's fields.

    Args:
        kind: The class to make.
        names: For each of its fields, what configs call it, or its value.
        fields: The config.
        values: Fields that are settled already.

    Raises:
        ConfigError: A field that is missing or is not a number.
    """
    for entry in dataclasses.fields(cast(Any, kind)):
        if entry.name in values or entry.name not in names:
            continue
        forms = names[entry.name]
        if not isinstance(forms, list):
            values[entry.name] = forms
            continue
        found = next((name for name in forms if name.split()[0] in fields), None)
        if found is not None:
            value = _value(found, entry.type, fields)
            values[entry.name] = _CONVERSIONS.get(entry.name, lambda x: x)(value)
        elif entry.default is dataclasses.MISSING:
            raise ConfigError(f"the model's config lacks {forms[0]}")
    return kind(**values)


def _value(form: str, kind: Any, fields: Fields) -> Any:
    """Look up a field, or work out a form such as ``a * b / c``; in whole numbers."""
    name, *rest = form.split()
    for each in (name, *rest[1::2]):
        if each not in fields:
            raise ConfigError(f"the model's config lacks {each}")
        value, is_whole = fields[each], kind == "int" or bool(rest)
        if is_whole and type(value) is not int:
            raise ConfigError(f"{each} is {value!r}; it must be a whole number")
        if kind == "float" and type(value) not in (int, float):
            raise ConfigError(f"{each} is {value!r}; it must be a number")
    value = fields[name]
    for sign, each in zip(rest[::2], rest[1::2], strict=True):
        value = value * fields[each] if sign == "*" else value // fields[each]
    return value


def _pattern(family: Family, fields: Fields) -> str:
    """Return the layer pattern; a list of names goes before a string of letters.

    Where a config has neither, all layers are of one kind but those that it numbers.
    A layer that is two of ours has an MLP or experts for its second.
    """
    spellings = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    names: Sequence[str] = next((fields[n] for n in spellings if n in fields), ())
    letters = family.layers
    if not names and family.first:
        depth = _value("num_hidden_layers", "int", fields)
        attention = fields.get("attn_layer_indices", ())
        names = [ATTENTION if n in attention else family.first for n in range(depth)]
    if not names:
        raise ConfigError(f"the model's config has none of {', '.join(spellings)}")
    unknown = sorted(set(names) - set(letters) - set(LAYER_PARTS))
    if unknown:
        known = ", ".join(letters)
        raise UnsupportedModelError(
            f"layer types {unknown} are not implemented; known are {known}"
        )
    pattern = "".join(letters.get(name, name) for name in names)
    depth = fields.get("num_hidden_layers", len(pattern))
    if depth != len(pattern):
        raise ConfigError(
            f"num_hidden_layers is {depth}, but the layer pattern {pattern!r} has "
            f"{len(pattern)} layers"
        )
    second = family.second
    if second == MOE and not fields.get("num_local_experts"):
        second = MLP
    return "".join(letter + second for letter in pattern)
