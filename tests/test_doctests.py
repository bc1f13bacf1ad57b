"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def modules_with_examples() -> list[str]:
    """List the modules of the package and of both sides that show an example."""
    found: list[str] = []
    for folder in ("lockstep", "lockstep/reference", "lockstep/optimized"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if ">>>" in path.read_text(encoding="utf-8"):
                found.append(".".join((*folder.split("/"), path.stem)))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    """Each example gives what it says."""
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
