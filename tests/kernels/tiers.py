"""Kernels in the place of the torch tier, for tests written for that."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.assemble import KERNELS
from tests.factories import load


def load_kernels(side: str, module: str) -> ModuleType | SimpleNamespace:
    """Import a side's module; on the optimized side, with kernels where there are."""
    twin = load(side, module)
    if side == "reference":
        return twin
    found: dict[str, Any] = dict(vars(twin))
    for key, place in KERNELS["triton"].items():
        name, symbol = key.split(".")
        if name == module:
            path, _, function = place.partition(":")
            home = importlib.import_module(f"lockstep.optimized.{path}")
            found[symbol] = getattr(home, function)
    return SimpleNamespace(**found)


def use_kernels(monkeypatch: pytest.MonkeyPatch, *tests: ModuleType) -> None:
    """Let the tests of some modules run kernels."""
    for module in tests:
        monkeypatch.setattr(module, "load", load_kernels)
