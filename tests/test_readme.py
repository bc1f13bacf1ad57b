"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fences(language: str) -> list[str]:
    """List the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def shape(text: str) -> list[str]:
    """Keep what does not hang on the last bit of a sampled model: lines in brackets."""
    return [line for line in text.splitlines() if line.startswith("(")]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The code runs as it stands, and the cache does what is shown."""
    (code,) = fences("python")
    (shown,) = fences("text")
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert shape(printed) == shape(shown)
    assert len(shape(shown)) == 2


def test_links_lead_somewhere() -> None:
    """Every relative link names a file of the checkout."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
