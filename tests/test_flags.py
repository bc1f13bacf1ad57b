"""No switch between slow and fast forms is read on the optimized side.

Whatever can be exchanged is a component, chosen when an engine is built. What code
reads of `EngineConfig` are knobs of the engine: how it caches, what it records, which
steps it pads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.config import EngineConfig, Sizes

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("reference", "optimized")

#: Options that code of a side may read, by file, and what they are.
KNOBS = {
    ("engine.py", "graphs"): "which steps are padded; also the runner of them",
    ("engine.py", "record_logprobs"): "what records hold",
}
#: Options that the sizes of an engine carry on: numbers, not switches.
SIZES = {entry.name for entry in fields(Sizes)}
OPTIONS = {entry.name for entry in fields(EngineConfig)} - SIZES
#: Attributes of the pools that have the name of an option whose value they were given.
OWN = {("kv_blocks.py", "eviction")}


def reads(text: str) -> Iterator[str]:
    """List options, environment variables and switches that a module reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if node.attr in OPTIONS:
                yield node.attr
            if node.attr in ("environ", "getenv"):
                yield "environment"
        if isinstance(node, ast.Name | ast.arg):
            name = node.id if isinstance(node, ast.Name) else node.arg
            if name.lower().startswith(("use_", "enable_", "disable_")):
                yield name


def found(side: str) -> set[tuple[str, str]]:
    """List what the modules of a side read."""
    paths = sorted((ROOT / side).rglob("*.py"))
    return {(path.name, name) for path in paths for name in reads(path.read_text())}


@pytest.mark.parametrize("folder", SIDES)
def test_no_switch_is_read(folder: str) -> None:
    """Nothing but the engine's own knobs."""
    assert found(folder) - OWN <= set(KNOBS)


def test_the_list_is_not_longer_than_needed() -> None:
    """A knob that nothing reads any more leaves the list."""
    assert set(KNOBS) <= found("optimized")
    assert found("reference") | found("optimized") >= OWN


def test_a_switch_would_be_seen() -> None:
    """In each of the ways in which one could be read."""
    text = """
import os
def scan(tokens, use_chunks):
    if config.kernels == "torch" or os.environ.get("FAST"):
        return tokens
"""
    assert set(reads(text)) == {"use_chunks", "kernels", "environment"}
