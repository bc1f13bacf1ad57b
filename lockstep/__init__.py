"""Lockstep: an inference engine for hybrid language models, written twice.

``lockstep.reference`` is readable and defines what is right; ``lockstep.optimized``
does the same thing fast. Names are resolved on first use, so that importing the package
costs nothing and each side can be used with torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config import EngineConfig, ModelConfig
    from lockstep.llm import LLM
    from lockstep.request import RequestOutput, SamplingParams
    from lockstep.weights import RandomWeights

__version__ = "0.1.0"

_HOMES = {
    "LLM": "lockstep.llm",
    "EngineConfig": "lockstep.config",
    "ModelConfig": "lockstep.config",
    "RandomWeights": "lockstep.weights",
    "RequestOutput": "lockstep.request",
    "SamplingParams": "lockstep.request",
}

__all__ = [
    "LLM",
    "EngineConfig",
    "ModelConfig",
    "RandomWeights",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
