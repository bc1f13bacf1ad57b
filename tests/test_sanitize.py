"""What a memory checker says is read right, and the work that it watches is whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import sanitize
from scripts.sanitize import ENGINES, PLANTED, Result, count_errors, count_reports

ROOT = sanitize.ROOT
RIGHT = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= COMPUTE-SANITIZER\n"
    "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
WRONG = {
    "memcheck": """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _append_kernel+0x250 in attention.py:223
=========     by thread (32,0,0) in block (0,0,0)
=========     Access at 0x7f2a0be00280 is out of bounds
=========     and is 129 bytes after the nearest allocation
=========
========= Invalid __global__ read of size 16 bytes
=========     at _append_kernel+0x210 in attention.py:222
=========     by thread (33,0,0) in block (0,0,0)
=========
========= Misaligned Address access of size 8 bytes
=========     at _copy_states_kernel+0x90
=========
========= ERROR SUMMARY: 3 errors
""",
    "racecheck": """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _race_kernel+0xa0 in work.py:3
=========     and Read access at _race_kernel+0xc0 in work.py:3 [128 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
""",
}
REPORTS = {
    "memcheck": {"_append_kernel": 2, "_copy_states_kernel": 1},
    "racecheck": {"_race_kernel": 1},
}


@pytest.mark.parametrize("tool", PLANTED)
def test_summaries_are_read(tool: str) -> None:
    """None is not zero; and reports are known by their kernels."""
    assert count_errors(tool, RIGHT[tool]) == 0
    assert count_errors(tool, WRONG[tool]) == sum(REPORTS[tool].values())
    assert count_errors(tool, "Segmentation fault") is None
    assert count_reports(WRONG[tool]) == REPORTS[tool]
    assert not count_reports(RIGHT[tool])


def result(tool: str, work: str, output: str, code: int = 0) -> Result:
    """Make a result from what a tool printed."""
    errors = count_errors(tool, output)
    return Result(tool, work, errors, 1.0, code, count_reports(output))


@pytest.mark.parametrize("tool", PLANTED)
def test_only_a_run_without_errors_is_right(tool: str) -> None:
    """A planted fault must be seen, an exit code counts, and so does silence."""
    planted = PLANTED[tool]
    assert not [*result(tool, "norm", RIGHT[tool]).problems()]
    assert not [*result(tool, planted, WRONG[tool], code=1).problems()]
    for work, output, code in (
        ("norm", WRONG[tool], 0),
        ("norm", RIGHT[tool], 1),
        ("norm", "", 0),
        (planted, RIGHT[tool], 0),
        (planted, "", 1),
    ):
        assert [*result(tool, work, output, code).problems()], (work, output, code)


def test_every_kernel_has_work() -> None:
    """Modules and engines are the same here and there, and no kernel is passed over."""
    works = work("--help").stdout
    for name in (*ENGINES, *sanitize.entry_kernels(), *PLANTED.values()):
        assert re.search(rf"[{{,]{name}[,}}]", works), name
    for module, names in sanitize.entry_kernels().items():
        text = (ROOT / f"optimized/kernels/{module}.py").read_text(encoding="utf-8")
        assert names == sorted(re.findall(r"^def (\w+_kernel)\(", text, re.M))


def work(*arguments: str, interpret: bool = True) -> subprocess.CompletedProcess[str]:
    """Run some work on the CPU."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "2000"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", str(sanitize.WORK), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("module", ["norm", "mlp", "snapshots"])
def test_work_notes_every_launch(module: str, tmp_path: Path) -> None:
    """On a CPU, kernels are interpreted; all of the module's are launched."""
    notes = tmp_path / "launches.json"
    given = f"{module}:float32", "--device", "cpu", "--launches", str(notes)
    done = work(*given)
    assert not done.returncode, done.stderr
    launches = json.loads(notes.read_text(encoding="utf-8"))
    wanted = {f"{module}.{name}" for name in sanitize.entry_kernels()[module]}
    assert set(launches) == wanted
    assert all(each["count"] > 0 for each in launches.values())


#: Compiles the kernels with planted faults, and prints their instructions.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from scripts import sanitize_work as work

for kernel in (work._race_kernel, work._write_past_kernel):
    source = ASTSource(kernel, {"target": "*i32"}, {"SIZE": work.THREADS})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, compiled.asm["cubin"][:4], compiled.asm["ptx"])
"""


def test_faults_are_planted() -> None:
    """They compile, and no barrier stands between write and read."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    race, write = done.stdout.split("_write_past_kernel b")
    assert re.search(r"st\.volatile\.shared.*ld\.volatile\.shared", race, re.S)
    assert "bar.sync" not in race
    assert "st.global" in write


#: Says what the checker would, and runs what it is given.
TOOL = """#!{python}
import subprocess, sys
from pathlib import Path
FOLDER, RIGHT, WRONG = Path({folder!r}), {right!r}, {wrong!r}
if sys.argv[1:] == ["--version"]:
    print("Version 1.2.3 (build 4)")
else:
    tool, at = sys.argv[sys.argv.index("--tool") + 1], sys.argv.index({python!r})
    code = subprocess.call(sys.argv[at:])
    is_planted = sys.argv[at + 2].startswith("planted")
    # Another one is in the way of the first run of some work.
    seen = FOLDER / f"seen-{{tool}}"
    if sys.argv[at + 2] != "norm" or seen.exists():
        print((WRONG if is_planted != {broken} else RIGHT)[tool])
    else:
        seen.touch()
    sys.exit(code)
"""
#: Launches nothing, and says that it launched all kernels.
STUB = """
import json, sys
from pathlib import Path
from scripts.sanitize import entry_kernels

name, path = sys.argv[1].partition(":")[0], Path(sys.argv[3])
kernels = [f"{name}.{kernel}" for kernel in entry_kernels().get(name, [])]
path.write_text(json.dumps({k: {"count": 2, "seconds": 0.5} for k in kernels}))
"""


def run_all(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, broken: bool = False
) -> tuple[int, dict[str, Any]]:
    """Run everything with a tool and work that are made up; returns what it gave."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        TOOL.format(
            python=sys.executable,
            broken=broken,
            folder=str(folder),
            right=RIGHT,
            wrong=WRONG,
        )
    )
    tool.chmod(0o755)
    stub, output = folder / "work.py", folder / "results/sanitizer.json"
    stub.write_text(STUB)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(sanitize, "WORK", stub)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    given = ["sanitize.py", "--commit", "abc", "--output", str(output), *arguments]
    monkeypatch.setattr(sys, "argv", [*given, "--jobs", "2"])
    return sanitize.main(), json.loads(output.read_text(encoding="utf-8"))


def test_all_that_is_said_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each tool, with each kernel's launches; planted faults apart."""
    code, kept = run_all(monkeypatch, tmp_path, "--only", "norm", "mlp")
    assert not code and not kept["problems"]
    assert kept["commit"] == "abc" and kept["compute_sanitizer"] == "1.2.3"
    assert set(kept["planted_faults_seen"]) == set(PLANTED)
    assert all(kept["planted_faults_seen"].values())
    runs = {(run["tool"], run["work"]): run for run in kept["runs"]}
    assert set(runs) == {(tool, work) for tool in PLANTED for work in ("norm", "mlp")}
    row = {"launches": 2, "errors": 0, "seconds": 0.5}
    assert kept["kernels"]["norm._rms_norm_kernel"] == dict.fromkeys(PLANTED, row)


def test_errors_fail_and_so_does_a_kernel_that_is_not_launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is named; and a tool that sees no planted fault is not believed."""
    code, kept = run_all(monkeypatch, tmp_path, "--only", "norm", broken=True)
    said = "\n".join(kept["problems"])
    assert code == 1
    assert "memcheck of norm: 3 errors, {'_append_kernel': 2" in said
    assert "racecheck of planted-race: the planted fault was not seen" in said
    kernels = sanitize.entry_kernels()
    kernels["norm"].append("_forgotten_kernel")
    monkeypatch.setattr(sanitize, "entry_kernels", lambda: kernels)
    code, kept = run_all(monkeypatch, tmp_path, "--only", "norm")
    assert code == 1
    wanted = [f"{tool}: norm._forgotten_kernel was not launched" for tool in PLANTED]
    assert kept["problems"] == wanted


def test_a_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the places where it was looked for."""
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="compute-sanitizer is neither on PATH"):
        sanitize.find_tool()
