"""Builds an engine from the components of either side; alone in knowing both."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from lockstep.config import EngineConfig, ModelConfig, Sizes
from lockstep.errors import ConfigError
from lockstep.interfaces import Components, component_keys
from lockstep.parameters import Parameters

BACKENDS = ("reference", "optimized")
#: Options of `EngineConfig` that only the optimized side understands.
OPTIMIZED_ONLY = ("graphs", "kernels", "side_stream")


def build_components(
    backend: str, replacements: Mapping[str, Any] | None = None
) -> Components:
    """Collect the components of a backend, with some replaced.

    Args:
        backend: ``reference`` or ``optimized``.
        replacements: For each replaced ``module.symbol`` another side's name, or the
            function or class itself.

    Raises:
        ConfigError: An unknown backend or component.
    """
    known = component_keys()
    choices = {**dict.fromkeys(known, backend), **(replacements or {})}
    unknown = sorted(set(choices) - set(known))
    if unknown:
        raise ConfigError(f"unknown components {unknown}; known are {', '.join(known)}")
    chosen: dict[str, Any] = {}
    for key, choice in choices.items():
        module, symbol = key.split(".")
        is_name = isinstance(choice, str)
        chosen[symbol] = getattr(_import(choice, module), symbol) if is_name else choice
    return Components(**chosen)


def build_engine(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    sizes: Sizes,
    parameters: Parameters,
    device: torch.device,
    backend: str = "reference",
    components: Mapping[str, Any] | None = None,
) -> Any:
    """Build an engine of one backend.

    Raises:
        ConfigError: An unknown backend or component, one that does not exist yet, or an
            option that the backend does not have.
    """
    for name in OPTIMIZED_ONLY:
        if backend == "reference" and getattr(engine_config, name) is not None:
            raise ConfigError(
                f"{name}={getattr(engine_config, name)!r} is an option of the "
                'optimized backend; leave it unset with backend="reference"'
            )
    engine = _import(backend, "engine").Engine
    parts = build_components(backend, components)
    return engine(model_config, engine_config, sizes, parameters, parts, device)


def _import(backend: str, name: str) -> ModuleType:
    """Import a module of a backend, where there is one."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; known are {', '.join(BACKENDS)}")
    path = f"lockstep.{backend}.{name}"
    if find_spec(path) is None:
        raise ConfigError(f"the {backend} backend has no {name} yet")
    return import_module(path)
