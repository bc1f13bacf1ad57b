"""Lockstep: an inference engine for hybrid language models, written twice.

``lockstep.reference`` is readable and defines what is right; ``lockstep.optimized``
does the same thing fast. Names are resolved on first use, so that importing the package
costs nothing and each side can be used with torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.chat import Chat as Chat
    from lockstep.config import EngineConfig as EngineConfig
    from lockstep.config import ModelConfig as ModelConfig
    from lockstep.llm import LLM as LLM
    from lockstep.request import RequestOutput as RequestOutput
    from lockstep.request import SamplingParams as SamplingParams
    from lockstep.stream import StreamDelta as StreamDelta
    from lockstep.weights import RandomWeights as RandomWeights

__version__ = "0.1.0"

_HOMES = {
    "LLM": "lockstep.llm",
    "Chat": "lockstep.chat",
    "EngineConfig": "lockstep.config",
    "ModelConfig": "lockstep.config",
    "RandomWeights": "lockstep.weights",
    "RequestOutput": "lockstep.request",
    "SamplingParams": "lockstep.request",
    "StreamDelta": "lockstep.stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
