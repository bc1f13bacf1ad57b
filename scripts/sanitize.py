"""Run kernels and small engines under compute-sanitizer, and write down what it says.

    python scripts/sanitize.py --commit COMMIT [--output FILE] [--only WORK ...]

``memcheck`` sees every kernel alone and whole engines, with one allocation for each
tensor; ``racecheck`` sees every kernel alone. Both must see a fault that is planted for
them, or what they say counts for nothing. All is compiled in runs without the tool
first. Fails if anything is wrong, if a run says nothing, or if a kernel of the package
was not launched. Needs a GPU, and compute-sanitizer of the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "scripts/sanitize_work.py"
OUTPUT = ROOT / "benchmarks/results/sanitizer.json"
#: Exit code of what is given up.
TIMED_OUT = 124
ENGINES = ("engine-off", "engine-padded")
#: What kernels compute in; each is compiled by a process of its own.
DTYPES = ("float32", "bfloat16", "float64")
#: The fault that each tool must see.
PLANTED = {"memcheck": "planted-write", "racecheck": "planted-race"}
#: What each tool is told besides.
OPTIONS = {
    # Calls that fail raise exceptions anyway, and some are meant to.
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
}
SUMMARIES = {
    "memcheck": re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?", re.M),
    "racecheck": re.compile(r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed", re.M),
}
#: The kernel that a report is about.
_REPORTS = re.compile(
    r"^=+ (?:Invalid|Misaligned)[^\n]*\n=+\s+at (\w+)"
    r"|^=+ (?:Error|Warning): [^\n]*?Race reported between \w+ access at (\w+)",
    re.M,
)


@dataclass
class Result:
    """What a tool said of one piece of work.

    Attributes:
        tool: The tool.
        work: What ran under it.
        errors: How many errors it counts; None if it said nothing.
        seconds: How long all took, start of Python included.
        code: Exit code of the process.
        reports: How many reports are about each kernel.
        launches: Launches and seconds of each kernel.
        output: All that was printed.
    """

    tool: str
    work: str
    errors: int | None
    seconds: float
    code: int
    reports: Counter[str]
    launches: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    output: str = ""

    @property
    def is_planted(self) -> bool:
        """Whether there must be errors."""
        return self.work in PLANTED.values()

    @property
    def is_silent(self) -> bool:
        """Whether the tool came to an end and said nothing."""
        return self.errors is None and self.code != TIMED_OUT

    def problems(self) -> Iterator[str]:
        """Say what is wrong with it."""
        name = f"{self.tool} of {self.work}"
        if self.errors is None:
            yield f"{name}: the tool gave no summary"
        elif self.is_planted:
            if not self.errors:
                yield f"{name}: the planted fault was not seen"
        elif self.errors:
            yield f"{name}: {self.errors} errors, {dict(self.reports)}"
        elif self.code:
            yield f"{name}: exit code {self.code}"


def entry_kernels() -> dict[str, list[str]]:
    """List the kernels that launchers launch, by module."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "optimized/kernels").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
        }
        # A launch is a kernel's name with a grid as its index.
        launched = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        }
        if kernels & launched:
            found[path.stem] = sorted(kernels & launched)
    return found


def find_tool() -> str:
    """Find compute-sanitizer on the path or in the toolkit's folder."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [f"{home}/bin", f"{home}/compute-sanitizer", "/usr/local/cuda/bin"]
    places = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    tool = shutil.which("compute-sanitizer", path=places)
    if tool is None:
        raise SystemExit(
            "compute-sanitizer is neither on PATH nor in $CUDA_HOME/bin nor in "
            "/usr/local/cuda/bin; it comes with the CUDA toolkit"
        )
    return tool


def count_errors(tool: str, output: str) -> int | None:
    """Read how many errors a tool counts; None if it gave no summary."""
    counts = [int(count) for count in SUMMARIES[tool].findall(output)]
    return sum(counts) if counts else None


def count_reports(output: str) -> Counter[str]:
    """Count the printed reports of each kernel."""
    return Counter(first or second for first, second in _REPORTS.findall(output))


def run_work(
    work: str, timeout: float, folder: Path, tool: str = "", sanitizer: str = ""
) -> Result:
    """Run one piece of work, by itself or under a tool."""
    launches = folder / f"{tool or 'plain'}-{work}.json"
    command = [sys.executable, str(WORK), work, "--launches", str(launches)]
    if tool:
        command = [
            *(sanitizer, "--tool", tool, "--launch-timeout", "120"),
            *("--target-processes", "application-only", "--show-backtrace", "no"),
            *(*OPTIONS[tool], *command),
        ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Else many tensors are one allocation, in which nothing is out of bounds.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    environment.setdefault("TRITON_CACHE_DIR", str(ROOT / ".data/cache/triton"))
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        code, raw = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, raw = TIMED_OUT, error.stdout or b""
    output = raw.decode("utf-8", "replace")
    errors = count_errors(tool, output) if tool else None
    seconds = time.perf_counter() - begin
    result = Result(tool, work, errors, seconds, code, count_reports(output))
    result.output = output
    if launches.exists():
        result.launches = json.loads(launches.read_text(encoding="utf-8"))
    said = f", {errors} errors" if tool else ""
    print(f"{tool or 'compiled':9} {work:14} {seconds:6.1f} s{said}", flush=True)
    return result


def run_all(works: Sequence[str], options: argparse.Namespace) -> list[Result]:
    """Compile everything, then run it under the tools, a few at a time."""
    sanitizer = find_tool()
    pairs = [("memcheck", work) for work in works]
    pairs += [("racecheck", work) for work in works if work not in ENGINES]
    pairs += list(PLANTED.items())
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        compiled = [*PLANTED.values()]
        for work in works:
            whole = work in ENGINES
            compiled += [work] if whole else [f"{work}:{dtype}" for dtype in DTYPES]
        run = partial(run_work, timeout=options.timeout, folder=Path(name))
        for result in pool.map(run, compiled):
            if result.code and not result.is_planted:
                raise SystemExit(f"{result.work} fails by itself:\n{result.output}")
        check = partial(run, sanitizer=sanitizer)
        checked = [pool.submit(check, work, tool=tool) for tool, work in pairs]
        results = [each.result() for each in checked]
        # Several tools at once may get in each other's way.
        return [
            check(each.work, tool=each.tool) if each.is_silent else each
            for each in results
        ]


def missing(results: Iterable[Result], modules: Iterable[str]) -> Iterator[str]:
    """Say which kernels of some modules a tool did not see launched."""
    results = list(results)
    for tool in PLANTED:
        launched = {
            kernel for each in results if each.tool == tool for kernel in each.launches
        }
        for module, names in entry_kernels().items():
            for name in names if module in modules else ():
                if f"{module}.{name}" not in launched:
                    yield f"{tool}: {module}.{name} was not launched"


def by_kernel(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Add up launches, reports and seconds of each kernel, by tool."""
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        for kernel, note in result.launches.items():
            tools = rows.setdefault(kernel, {})
            row = tools.setdefault(
                result.tool, {"launches": 0, "errors": 0, "seconds": 0.0}
            )
            row["launches"] += note["count"]
            row["seconds"] = round(row["seconds"] + note["seconds"], 3)
            row["errors"] += result.reports[kernel.partition(".")[2]]
    return dict(sorted(rows.items()))


def summary(results: Sequence[Result], commit: str) -> dict[str, Any]:
    """Put all that is kept of the results together."""
    import torch

    said = subprocess.run([find_tool(), "--version"], capture_output=True, text=True)
    tool = re.search(r"Version (\S+)", said.stdout)
    runs = [
        {
            "tool": each.tool,
            "work": each.work,
            "errors": each.errors,
            "seconds": round(each.seconds, 1),
            "launches": sum(note["count"] for note in each.launches.values()),
        }
        for each in results
    ]
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "compute_sanitizer": tool[1] if tool else said.stdout,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "planted_faults_seen": {
            each.tool: each.errors for each in results if each.is_planted
        },
        "runs": [run for run in runs if run["work"] not in PLANTED.values()],
        "kernels": by_kernel(each for each in results if not each.is_planted),
    }


def main() -> int:
    """Run all, write the summary, and say what is wrong."""
    parser = argparse.ArgumentParser(description="Run compute-sanitizer.")
    parser.add_argument("--commit", required=True, help="what is being checked")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one")
    parser.add_argument("--only", nargs="+", help="kernel modules or engines to run")
    options = parser.parse_args()
    modules = list(entry_kernels())
    works = options.only or [*ENGINES, *modules]
    results = run_all(works, options)
    problems = [text for each in results for text in each.problems()]
    problems += missing(results, set(modules) & set(works))
    kept = summary(results, options.commit) | {"problems": problems}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for each in results:
        if any(each.problems()):
            print(f"== {each.tool} of {each.work}\n{each.output[-4000:]}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
