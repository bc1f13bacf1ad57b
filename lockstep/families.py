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

from lockstep.config import LAYER_PARTS, ModelConfig
from lockstep.errors import CheckpointError, ConfigError, UnsupportedModelError
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
            ``{expert}`` stands for a tensor an expert, to be stacked.
        transform: From the stored tensor, or one expert's, to the parameter.
    """

    names: tuple[str, ...]
    transform: Callable[[Tensor], Tensor] = as_stored


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: a table of ``families.toml``, which says what is what."""

    prefixes: list[str]
    ignored: list[str]
    mixer: str
    layers: dict[str, str]
    defaults: dict[str, Any]
    implemented: dict[str, list[Any]]
    fields: dict[str, dict[str, list[str]]]
    tensors: dict[str, list[str]]

    def sources(self, config: ModelConfig) -> dict[str, Source]:
        """List the source of every parameter, by flat name."""
        sources: dict[str, Source] = {}
        for name in parameter_specs(config):
            match = re.fullmatch(r"(layers\.\d+\.)?(\w+)(\.\w+)?", name)
            assert match is not None
            layer, base, part = match.groups(default="")
            stored = self.tensors.get(base, [self.mixer + base])
            names = tuple(layer + form + part for form in stored)
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
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, values in family.implemented.items():
        if name in fields and fields[name] not in values:
            either = "".join(f" or {value!r}" for value in values)
            raise UnsupportedModelError(
                f"{name}={fields[name]!r} is not implemented for model family "
                f"{fields['model_type']!r}; it must be unset{either}"
            )
    if fields.get("num_nextn_predict_layers"):
        warnings.warn("layers for multi-token prediction are left out", stacklevel=2)
    pattern = _pattern(family.layers, fields)
    settled = {"family": fields["model_type"], "layer_pattern": pattern}
    fields = {**family.defaults, **fields}
    for letter, part in LAYER_PARTS.items():
        if letter in pattern:
            kind, _ = get_args(get_type_hints(ModelConfig)[part])  # the class, or None
            settled[part] = _fill(kind, family.fields[part], fields)
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
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return cast(dict[str, Any], content)


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


def _fill(
    kind: type[T], names: Mapping[str, list[str]], fields: Fields, **values: Any
) -> T:
    """Make a `ModelConfig`, or the shape of one kind of layer, of a config's fields.

    Args:
        kind: The class to make.
        names: For each of its fields, what configs call it.
        fields: The config.
        values: Fields that are settled already.

    Raises:
        ConfigError: A field that is missing or is not a whole number.
    """
    for entry in dataclasses.fields(cast(Any, kind)):
        if entry.name in values or entry.name not in names:
            continue
        found = next((name for name in names[entry.name] if name in fields), None)
        if found is not None:
            value = fields[found]
            if entry.type == "int" and type(value) is not int:
                raise ConfigError(f"{found} is {value!r}; it must be a whole number")
            values[entry.name] = _CONVERSIONS.get(entry.name, lambda x: x)(value)
        elif entry.default is dataclasses.MISSING:
            raise ConfigError(f"the model's config lacks {names[entry.name][0]}")
    return kind(**values)


def _pattern(letters: Mapping[str, str], fields: Fields) -> str:
    """Return the layer pattern; a list of names goes before a string of letters."""
    spellings = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    names: Sequence[str] = next((fields[n] for n in spellings if n in fields), ())
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
    return pattern
