"""Builds an engine from the components of either side; alone in knowing both."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from lockstep.config import EngineConfig, ModelConfig, Sizes
from lockstep.errors import ConfigError
from lockstep.interfaces import Components, component_key, component_keys
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
    _check_backend(backend)
    replacements = dict(replacements or {})
    unknown = sorted(set(replacements) - set(component_keys()))
    if unknown:
        raise ConfigError(
            f"unknown components {unknown}; known are {', '.join(component_keys())}"
        )
    return Components(
        **{
            entry.name: _resolve(replacements.get(key, backend), key)
            for entry in fields(Components)
            for key in [component_key(entry)]
        }
    )


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
        ConfigError: An unknown backend or component, or an option that the backend does
            not have.
    """
    _check_backend(backend)
    for name in OPTIMIZED_ONLY:
        if backend == "reference" and getattr(engine_config, name) is not None:
            raise ConfigError(
                f"{name}={getattr(engine_config, name)!r} is an option of the "
                'optimized backend; leave it unset with backend="reference"'
            )
    module = importlib.import_module(f"lockstep.{backend}.engine")
    chosen = build_components(backend, components)
    return module.Engine(model_config, engine_config, sizes, parameters, chosen, device)


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; known are {', '.join(BACKENDS)}")


def _resolve(choice: Any, key: str) -> Any:
    if not isinstance(choice, str):
        return choice
    _check_backend(choice)
    module, symbol = key.split(".")
    return getattr(importlib.import_module(f"lockstep.{choice}.{module}"), symbol)
