"""The script that runs the whole matrix in shards, tried on the CPU with a tiny one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_matrix

REPORT = """<testsuites><testsuite name="pytest">
<testcase name="test_row[a-off]" time="0.5"><properties>
  <property name="steps of off" value="7"/>
  <property name="tokens of float32" value="3"/>
</properties></testcase>
<testcase name="test_row[b-padded]" time="0.25"><properties>
  <property name="steps of off" value="2"/>
</properties><failure message="token 1,&#10;not 0">traceback</failure></testcase>
<testcase name="test_row[c-padded]" time="0"><error message="no engine"/></testcase>
<testcase name="test_row[d-padded]" time="0"/>
</testsuite></testsuites>"""


def test_a_report_is_summed_up(tmp_path: Path) -> None:
    """Counts over all rows that ended, and which of them failed, with the reason."""
    (tmp_path / "report.xml").write_text(REPORT)
    found = gpu_matrix.read(tmp_path / "report.xml")
    rows = {"run": 3, "passed": 1, "failed": 2, "unfinished": 1}
    assert found["rows"] == rows
    assert found["steps"] == {"off": 9} and found["tokens"] == {"float32": 3}
    assert found["failed"] == [
        "test_row[b-padded]: token 1, not 0",
        "test_row[c-padded]: no engine",
    ]


def test_shards_of_one_matrix_come_together() -> None:
    """A newer result takes the place of its own older one and of no other."""
    found: dict[str, Any] = {}
    for shard, commit in (("1/2", "a"), ("triples", "b"), ("0/2", "b"), ("1/2", "c")):
        found = gpu_matrix.merge(found, shard, {"commit": commit})
    assert list(found["shards"]) == ["0/2", "1/2"]
    assert found["shards"]["1/2"] == {"commit": "c"}
    assert found["triples"] == {"commit": "b"}


@pytest.mark.parametrize("shard", ["0/3", "2/2", "1", "-1/2", "all"])
def test_what_is_no_shard_of_it_is_refused(shard: str) -> None:
    """Another division of the matrix, or none at all."""
    with pytest.raises(SystemExit, match="no part of the same matrix|neither i/n"):
        gpu_matrix.check({"shards": {"0/2": {}}}, shard)


def test_rows_chosen_by_name_replace_no_whole_shard(tmp_path: Path) -> None:
    """Nor the other way round: each kind has a file of its own."""
    output = tmp_path / "matrix.json"
    chosen = {"shards": {"0/2": {"select": "moe"}}}
    output.write_text(json.dumps(chosen))
    with pytest.raises(SystemExit, match="other rows of its shards"):
        gpu_matrix.main(["1/2", "--device", "cpu", "--output", str(output)])
    with pytest.raises(SystemExit, match="other rows of its shards"):
        gpu_matrix.merge({"shards": {"0/2": {}}}, "0/2", {"select": "moe"})
    gpu_matrix.check(chosen, "1/2", "moe")


class Pytest:
    """Stands in for a process that writes a report, or is still busy with its rows."""

    def __init__(self, status: int | None, report: str, is_slow: bool = False) -> None:
        """Say with what it ends, and what it writes; a slow one writes when stopped."""
        self.status, self.report, self.is_slow = status, report, is_slow

    def __call__(self, command: list[str], **_: Any) -> Pytest:
        """Start."""
        (path,) = (each for each in command if each.startswith("--junit-xml="))
        self.path = Path(path.partition("=")[2])
        if not self.is_slow:
            self.write()
        return self

    def write(self) -> None:
        """Write the report, if there is any."""
        if self.report:
            self.path.write_text(self.report)

    def wait(self, limit: float) -> int | None:
        """End, unless it is slow."""
        if self.is_slow:
            raise subprocess.TimeoutExpired("pytest", limit)
        return self.status

    def send_signal(self, _: int) -> None:
        """Write what there is."""
        self.write()

    def poll(self) -> int | None:
        """Say how it ended."""
        return self.status

    def kill(self) -> None:
        """End in any case."""


ROW = """<testcase name="test_row[a]"><properties>
<property name="steps of off" value="7"/></properties></testcase>"""
LOST = '<testcase name="test_row[b]"/>'


@pytest.mark.parametrize(
    ("process", "is_complete"),
    [
        (Pytest(0, ROW), True),
        (Pytest(1, ROW), True),
        (Pytest(0, f"<suite>{ROW}{LOST}</suite>"), False),
        (Pytest(2, ROW), False),
        (Pytest(None, ROW, is_slow=True), False),
    ],
)
def test_only_a_shard_of_which_every_row_ended_is_complete(
    process: Pytest, is_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is lost, an early end, and one that comes late are all told."""
    monkeypatch.setattr(gpu_matrix.subprocess, "Popen", process)
    found = gpu_matrix.run("0/2", "cpu", 1, 0, "")
    assert found["is_complete"] is is_complete
    assert found["rows"]["passed"] == 1
    assert "select" not in found
    assert gpu_matrix.run("0/2", "cpu", 1, 0, "moe")["select"] == "moe"
    process.report = ""
    with pytest.raises(SystemExit, match="left no report"):
        gpu_matrix.run("0/2", "cpu", 1, 0, "")


def test_a_shard_is_run_and_merged(tmp_path: Path) -> None:
    """Rows of both dtypes in every way that a CPU has; a refusal runs nothing."""
    output = tmp_path / "matrix.json"
    output.write_text(json.dumps({"shards": {"0/500": {"commit": "before"}}}))
    options = ["--device", "cpu", "--jobs", "1", "--output", str(output)]
    options += ["--commit", "now"]
    assert gpu_matrix.main(["499/500", *options]) == 0
    found = json.loads(output.read_text())["shards"]
    assert found["0/500"] == {"commit": "before"}
    mine = found["499/500"]
    assert mine["commit"] == "now" and mine["is_complete"]
    assert mine["rows"]["passed"] == mine["rows"]["run"] > 8
    assert set(mine["steps"]) == {"off", "padded"}
    assert set(mine["tokens"]) == set(mine["ties"]) == {"float32", "bfloat16"}
    error, row = mine["largest"]["log-probabilities torch.float32"]
    assert error > 0 and row.startswith(f"{gpu_matrix.TESTS}::test_row[")
    with pytest.raises(SystemExit, match="no part of the same matrix"):
        gpu_matrix.main(["0/2", *options])
