"""Parameters from a checkpoint's files, or drawn at random by a stated rule."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.errors import CheckpointError
from lockstep.families import Source, family_of, read_json
from lockstep.parameters import ParameterKind, ParameterSpec, parameter_specs

#: Faults of a checkpoint that are listed; the rest is counted.
MAX_LISTED = 20


# Reading.


@dataclass(frozen=True)
class _Form:
    """How a checkpoint stores a parameter: as one tensor, or as several equal ones."""

    parts: list[str]
    shape: tuple[int, ...]
    transform: Callable[[Tensor], Tensor]


class Checkpoint:
    """The parameters of a checkpoint folder, read one at a time.

    Args:
        folder: Holds ``model.safetensors``, or shards with their index.
        config: What the folder's own config says.
        device: Where tensors are read to.

    Raises:
        CheckpointError: Files that are missing or damaged, or tensors that are
            missing, unknown or of the wrong shape; all are listed at once.
    """

    def __init__(self, folder: Path, config: ModelConfig, device: torch.device) -> None:
        """Open every file, and hold what is stored to what is asked for."""
        family = family_of(config.family)
        sources = family.sources(config)
        self._stored = _open_files(folder, device, family.prefixes)
        self._forms = {
            name: self._find(sources[name], spec)
            for name, spec in parameter_specs(config).items()
        }
        faults = [
            fault for form in self._forms.values() for fault in self._faults(form)
        ]
        known = {part for form in self._forms.values() for part in form.parts}
        for name in sorted(set(self._stored) - known):
            is_ignored = any(fnmatchcase(name, form) for form in family.ignored)
            faults += [] if is_ignored else [f"unknown: {name}"]
        if faults:
            raise CheckpointError(_summary(folder, faults))

    def fill(self, parameter: Tensor, name: str, _kind: ParameterKind) -> None:
        """Read a parameter into its place, one part at a time."""
        form = self._forms[name]
        places = parameter.view(len(form.parts), *form.shape)
        for place, part in zip(places, form.parts, strict=True):
            place.copy_(form.transform(self._stored[part][:].to(parameter.dtype)))

    def _find(self, source: Source, spec: ParameterSpec) -> _Form:
        """Take the first of a source's forms that is there, in part or whole."""
        forms: list[_Form] = []
        for name in source.names:
            shape, parts = spec.shape, name.split("+")
            if "{expert}" in name:
                parts = [name.format(expert=expert) for expert in range(shape[0])]
                shape = shape[1:]
            elif len(parts) > 1:
                shape = shape[0] // len(parts), *shape[1:]
            forms.append(_Form(parts, shape, source.transform))
        found = (
            form for form in forms if not self._stored.keys().isdisjoint(form.parts)
        )
        return next(found, forms[0])

    def _faults(self, form: _Form) -> Iterator[str]:
        """Say what is wrong with each part."""
        for part in form.parts:
            if part not in self._stored:
                yield f"missing: {part}"
                continue
            shape = tuple(self._stored[part].get_shape())
            if form.transform(torch.empty(shape, device="meta")).shape != form.shape:
                wanted = form.shape
                yield f"wrong shape: {part} is {shape}, the config asks for {wanted}"


def _open_files(
    folder: Path, device: torch.device, prefixes: list[str]
) -> dict[str, Any]:
    """List a checkpoint's tensors, unread, by their names less a prefix.

    Args:
        folder: Holds ``model.safetensors``, or shards with their index.
        device: Where tensors are read to.
        prefixes: Beginnings of names that are stripped.
    """
    from safetensors import SafetensorError, safe_open

    stored: dict[str, Any] = {}
    for path in _weight_files(folder):
        try:
            file = safe_open(path, framework="pt", device=str(device))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        for name in file.keys():  # noqa: SIM118
            prefix = next((p for p in prefixes if name.startswith(p)), "")
            stored[name.removeprefix(prefix)] = file.get_slice(name)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"{index} is damaged: it has no weight_map")
    return sorted({folder / str(shard) for shard in shards.values()})


def _summary(folder: Path, faults: list[str]) -> str:
    more = [f"and {len(faults) - MAX_LISTED} more"] if len(faults) > MAX_LISTED else []
    header = f"{folder}: {len(faults)} tensors do not fit the config"
    return "\n  ".join([header, *faults[:MAX_LISTED], *more])


# Drawing.


@dataclass(frozen=True)
class RandomWeights:
    """A rule by which weights are drawn, so that a model needs no checkpoint.

    The defaults make routing and decays look like a trained model's. Each tensor has
    its own generator, keyed by seed and name, on the device where it will live: it
    depends on no other tensor, and a narrower dtype only rounds it.

    Attributes:
        seed: Key of all draws.
        matrix_deviation: Standard deviation of matrices and filters; None for
            ``inputs ** -0.5``, which keeps every layer's output of order one.
        decay: Range of ``-A``.
        decay_in_log: Whether ``-A`` is uniform in its logarithm.
        time_step: Range of the time step of a zero input, uniform in its logarithm.
        skip: Mean and deviation of ``D``.
        norm_deviation: Deviation of norm weights, whose mean is one.
        offset_deviation: Deviation of biases and of router corrections.
    """

    seed: int = 0
    matrix_deviation: float | None = 0.02
    decay: tuple[float, float] = (1.0, 16.0)
    decay_in_log: bool = False
    time_step: tuple[float, float] = (0.001, 0.1)
    skip: tuple[float, float] = (1.0, 0.0)
    norm_deviation: float = 0.0
    offset_deviation: float = 0.0

    def fill(self, parameter: Tensor, name: str, kind: ParameterKind) -> None:
        """Draw a parameter in float32, and round it into its place."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty_like(parameter, dtype=torch.float32)
        parameter.copy_(self._draw(values, kind, generator))

    def _draw(
        self, values: Tensor, kind: ParameterKind, generator: torch.Generator
    ) -> Tensor:
        if kind == "decay":
            return -_uniform(values, self.decay, self.decay_in_log, generator)
        if kind == "time_step":
            step = _uniform(values, self.time_step, True, generator)
            return step + torch.log(-torch.expm1(-step))
        matrix = 0.0, self.matrix_deviation or values.shape[-1] ** -0.5
        offset = 0.0, self.offset_deviation
        others = {"norm": (1.0, self.norm_deviation), "skip": self.skip}
        others |= {"bias": offset, "correction": offset}
        mean, deviation = others.get(kind, matrix)
        return values.normal_(mean, deviation, generator=generator)


#: Weights under which outputs show every state and block they read. With default-like
#: weights a state is forgotten within tens of tokens, so one could be lost and nothing
#: seen.
WITNESS = RandomWeights(
    matrix_deviation=None,
    decay=(0.01, 2.0),
    decay_in_log=True,
    time_step=(0.1, 1.0),
    skip=(0.0, 0.1),
    norm_deviation=0.1,
    offset_deviation=0.1,
)


def _uniform(
    values: Tensor, limits: tuple[float, float], in_log: bool, generator: Any
) -> Tensor:
    low, high = (math.log(limit) if in_log else limit for limit in limits)
    values.uniform_(low, high, generator=generator)
    return values.exp_() if in_log else values
