"""What the README shows is what happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fences(language: str) -> list[str]:
    """List the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def shape(text: str) -> list[str]:
    """Keep what does not hang on the last bit of a sampled model: lines in brackets."""
    return [line for line in text.splitlines() if line.startswith("(")]


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The code runs as it stands, and the cache does what is shown."""
    codes, texts = fences("python"), fences("text")
    names: dict[str, Any] = {}
    for code, shown in zip(codes, texts, strict=True):
        exec(compile(code, "README.md", "exec"), names)
        printed = capsys.readouterr().out
        assert shape(printed) == shape(shown)
        assert shape(shown)


def commands() -> list[tuple[str, str]]:
    """List what is typed at a prompt for ``lockstep``, each with its output."""
    text = "".join(fences("console"))
    return re.findall(r"^\$ (lockstep .+)\n((?:(?!\$ ).*\n)*)", text, re.M)


def test_the_commands_run() -> None:
    """Each prints what is shown; a sampled text need only be some text."""
    found = commands()
    assert [line.split()[1] for line, _ in found] == ["generate", "info"]
    for line, shown in found:
        command = [sys.executable, "-m", *shlex.split(line)]
        env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip()
        if "generate" not in line:
            assert [each.rstrip() for each in done.stdout.splitlines()] == [
                each.rstrip() for each in shown.splitlines()
            ]


def fastest(row: dict[str, float]) -> str:
    """Name the fastest peer of those that gave out all of a workload's tokens."""
    whole = row.get("transformers_out_tokens") == row["out_tokens"]
    names = ["vllm", "sglang", *(["transformers"] if whole else [])]
    found = re.compile(rf"({'|'.join(names)})_[\d.]+_s")
    seconds = {m[1]: s for key, s in row.items() if (m := found.fullmatch(key))}
    name = min(seconds, key=lambda each: seconds[each])
    shown = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "`transformers`"}
    return f"{shown[name]} {seconds[name]:.4f}"


def test_speeds_are_those_measured() -> None:
    """Every row of the table, and none besides."""
    ours, peers = (
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for name in ("h200_workloads", "peers_h200")
    )
    expected = [
        f"| {shape} | {name} | {cell['median_s']:.4f} | {cell['share_of_floor']:.0%} | "
        f"{fastest(peers['rows'][shape][name])} |"
        for shape, cells in ours["rows"].items()
        for name, cell in cells.items()
    ]
    assert re.findall(r"^\| (?:nano3|dense4b) .*$", README, re.M) == expected


def test_links_lead_somewhere() -> None:
    """Every relative link names a file of the checkout."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
