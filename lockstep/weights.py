"""Parameters from a checkpoint's files, or drawn at random by a stated rule."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.errors import CheckpointError
from lockstep.families import Source, family_of, read_json
from lockstep.parameters import (
    ParameterKind,
    Parameters,
    ParameterSpec,
    build_parameters,
    parameter_specs,
)

#: Faults of a checkpoint that are listed; the rest is counted.
MAX_LISTED = 20

#: Wraps the names of tensors as they are made, to show progress.
Progress = Callable[[list[str]], Iterable[str]]


# Loading.


class Checkpoint:
    """The tensors of a checkpoint folder, by name, read one at a time.

    Args:
        folder: Holds ``model.safetensors``, or shards with their index.
        device: Where tensors are read to.
        prefixes: Beginnings of names that are stripped.

    Raises:
        CheckpointError: Files that are missing or damaged.
    """

    def __init__(
        self, folder: Path, device: torch.device, prefixes: tuple[str, ...] = ()
    ) -> None:
        """Open every file and note where each tensor is."""
        self.device = device
        self._open_files = ExitStack()
        #: For each tensor, less its prefix, its file and its name there.
        self.homes: dict[str, tuple[Any, str]] = {}
        for path in _weight_files(folder):
            file = self._open(path)
            for stored in file.keys():  # noqa: SIM118
                prefix = next((p for p in prefixes if stored.startswith(p)), "")
                self.homes[stored[len(prefix) :]] = (file, stored)

    def __enter__(self) -> Checkpoint:
        """Keep the files open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._open_files.close()

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(path, framework="pt", device=str(self.device))
            return self._open_files.enter_context(file)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        file, stored = self.homes[name]
        return tuple(file.get_slice(stored).get_shape())

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        file, stored = self.homes[name]
        return file.get_tensor(stored)


@dataclass(frozen=True)
class _Placement:
    """A parameter and the stored tensors that make it up, one or one an expert."""

    spec: ParameterSpec
    transform: Callable[[Tensor], Tensor]
    parts: list[str]
    is_stack: bool

    def faults(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Say what is wrong with each part."""
        wanted = self.spec.shape[1:] if self.is_stack else self.spec.shape
        for part in self.parts:
            if part not in checkpoint.homes:
                yield f"missing: {part}"
                continue
            shape = checkpoint.shape(part)
            if self.transform(torch.empty(shape, device="meta")).shape != wanted:
                yield f"wrong shape: {part} is {shape}, the config asks for {wanted}"

    def read(self, checkpoint: Checkpoint, model_dtype: torch.dtype) -> Tensor:
        """Read the parameter, one part at a time."""
        dtype = self.spec.dtype(model_dtype)
        read = (self.transform(checkpoint.read(part).to(dtype)) for part in self.parts)
        if not self.is_stack:
            return next(read).contiguous()
        stack = torch.empty(self.spec.shape, dtype=dtype, device=checkpoint.device)
        for place, part in zip(stack, read, strict=True):
            place.copy_(part)
        return stack


def load_parameters(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = iter,
) -> Parameters:
    """Read a checkpoint's parameters straight to their device and dtype.

    Raises:
        CheckpointError: Files that are missing or damaged, or tensors that are
            missing, unknown or of the wrong shape; all are listed at once.
    """
    family, specs = family_of(config.family), parameter_specs(config)
    sources = family.sources(config)
    with Checkpoint(folder, device, family.prefixes) as checkpoint:
        present = set(checkpoint.homes)
        placements = {
            name: _place(sources[name], spec, present) for name, spec in specs.items()
        }
        unknown = set(present)
        faults: list[str] = []
        for placement in placements.values():
            unknown.difference_update(placement.parts)
            faults += placement.faults(checkpoint)
        for name in sorted(unknown):
            faults += [] if name.startswith(family.ignored) else [f"unknown: {name}"]
        if faults:
            raise CheckpointError(_summary(folder, faults))
        flat = {
            name: placements[name].read(checkpoint, dtype)
            for name in progress([*specs])
        }
    return build_parameters(config, flat)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"{index} is damaged: it has no weight_map")
    return sorted({folder / str(shard) for shard in shards.values()})


def _place(source: Source, spec: ParameterSpec, present: set[str]) -> _Placement:
    """Take the first of a source's forms that is there, in part or whole."""
    forms: list[_Placement] = []
    for name in source.names:
        is_stack = "{expert}" in name
        experts = range(spec.shape[0] if is_stack else 1)
        parts = [name.format(expert=expert) for expert in experts]
        forms.append(_Placement(spec, source.transform, parts, is_stack))
    return next((form for form in forms if present.intersection(form.parts)), forms[0])


def _summary(folder: Path, faults: list[str]) -> str:
    listed = faults[:MAX_LISTED]
    if len(faults) > MAX_LISTED:
        listed.append(f"and {len(faults) - MAX_LISTED} more")
    header = f"{folder}: {len(faults)} tensors do not fit the config"
    return "\n  ".join([header, *listed])


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

    @classmethod
    def witness(cls, seed: int = 0) -> RandomWeights:
        """Return a rule under which outputs show every state and block they read.

        With default-like weights a state is forgotten within tens of tokens, so a test
        could lose one and see nothing.
        """
        return cls(
            seed=seed,
            matrix_deviation=None,
            decay=(0.01, 2.0),
            decay_in_log=True,
            time_step=(0.1, 1.0),
            skip=(0.0, 0.1),
            norm_deviation=0.1,
            offset_deviation=0.1,
        )

    def draw(self, name: str, spec: ParameterSpec, device: torch.device) -> Tensor:
        """Draw one parameter, in float32."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(spec.shape, device=device)
        if spec.kind is ParameterKind.DECAY:
            return -_uniform(values, self.decay, self.decay_in_log, generator)
        if spec.kind is ParameterKind.TIME_STEP:
            step = _uniform(values, self.time_step, True, generator)
            return step + torch.log(-torch.expm1(-step))
        mean, deviation = self._normal(spec)
        return values.normal_(mean, deviation, generator=generator)

    def _normal(self, spec: ParameterSpec) -> tuple[float, float]:
        if spec.kind is ParameterKind.NORM:
            return 1.0, self.norm_deviation
        if spec.kind is ParameterKind.SKIP:
            return self.skip
        if spec.kind in (ParameterKind.BIAS, ParameterKind.CORRECTION):
            return 0.0, self.offset_deviation
        return 0.0, self.matrix_deviation or spec.shape[-1] ** -0.5


def draw_parameters(
    config: ModelConfig,
    rule: RandomWeights,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = iter,
) -> Parameters:
    """Draw all parameters of a model on its device."""
    specs = parameter_specs(config)
    flat = {
        name: rule.draw(name, specs[name], device).to(specs[name].dtype(dtype))
        for name in progress([*specs])
    }
    return build_parameters(config, flat)


def _uniform(
    values: Tensor, limits: tuple[float, float], in_log: bool, generator: Any
) -> Tensor:
    low, high = (math.log(limit) if in_log else limit for limit in limits)
    values.uniform_(low, high, generator=generator)
    return values.exp_() if in_log else values
