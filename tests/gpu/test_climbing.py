"""The ladder and the claims on a GPU, at sizes of a few seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims
from lockstep import cli
from tests.tolerances import LOST_KERNELS

pytestmark = pytest.mark.gpu

RUNGS = ("loops", "sampling on the device", "fused kernels", "full graphs")


def test_rungs_are_timed_and_their_launches_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A graph is one launch of many kernels; loops start each by itself."""
    load = ("--prompts", "2", "--prompt-tokens", "32", "--new-tokens", "3")
    only = [part for name in RUNGS for part in ("--only", name)]
    command = ["ladder", "--device", "cuda", "--model", "demo", *load, *only]
    monkeypatch.setattr(
        sys, "argv", ["lockstep", *command, "--output", str(tmp_path), "--seconds", "5"]
    )
    with pytest.raises(SystemExit) as caught:
        cli.main()
    (path,) = tmp_path.glob("ladder_*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {row["status"] for row in found["rungs"]} == {"equal"}, found["rungs"]
    assert not caught.value.code
    assert set(found["rungs"][-1]["steps"]) == {"prefill graph", "decode graph"}
    loops, apart, fused, graph = (row["per_step"]["decode"] for row in found["rungs"])
    assert all(step["stored_states"] == 2 for step in (loops, apart, fused, graph))
    assert loops["host_reads"] > fused["host_reads"] == graph["host_reads"] == 1
    assert all(0 < row["share_of_floor"] < 1 for row in found["rungs"])
    if loops["why_none"]:
        # This machine's profiler sees no kernels, and the file says so.
        assert loops["launches"] is None
        return
    assert loops["launches"] > fused["launches"] > graph["launches"]
    assert loops["kernels"] == pytest.approx(loops["launches"], rel=LOST_KERNELS)
    assert graph["kernels"] > 2 * graph["launches"]
    # Index arrays one by one, and then in one copy; tokens come back in another.
    assert loops["copies"] > apart["copies"] > fused["copies"] >= 2
    assert graph["copies"] >= 2
    assert all(step["copied_bytes"] > 0 for step in (loops, fused, graph))


def test_every_claim_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No form is skipped, graphs are replayed, and all of them agree."""
    monkeypatch.setattr(claims, "TIMES", 2)
    monkeypatch.setattr(claims, "TOKENS", (1, 600))
    claims.main(shape="tiny", output=tmp_path)
    (path,) = tmp_path.glob("claims_*.json")
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
    rows: list[dict[str, Any]] = [row for each in parts.values() for row in each]
    assert all("ms" in row for row in rows), rows
    assert all(row["mode"] == "graph" for row in parts["staging"])
    assert {row["mode"] for row in parts["graphs"]} == {"graph", "padded", "eager"}
    assert {row["form"] for row in parts["staging"]} == set(claims.STAGING)
    assert {row["mode"] for row in parts["streams"]} == {"graph"}
    assert all(0 < row["occupancy"] <= 1 for row in parts["tiles"])
    counted = parts["bookkeeping"]
    assert all(row["launches"] or row["why_none"] for row in counted)
    if not counted[0]["why_none"]:
        assert counted[0]["copies"] < counted[1]["copies"]
