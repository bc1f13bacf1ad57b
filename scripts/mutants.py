"""Apply each known fault to a copy of the tree and see its test fail.

    python scripts/mutants.py [--jobs 2] [--only M3 --only M7] [--gpu]

The faults stand in ``tests/mutants.py``. One counts as *killed* when each test that it
names fails in its own body, by an assertion or an error of the engine. A test that
passes lets it *survive*; one that cannot even be collected or whose code cannot be
imported says nothing (*broken*), nor does one that never ends (*timeout*).

Each test runs in a process of its own. To start Python and import torch takes longer
than most tests, so these processes are forked from one that has imported what others
wrote, and nothing of this repository.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.process import BaseProcess
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.mutants import Mutant  # noqa: E402

LIST = Path("tests/mutants.py")
#: What tests import of others; what is not installed is left out.
PRELOADED = [
    *("pytest", "hypothesis", "numpy", "torch", "jaxtyping", "beartype", "rich"),
    *("safetensors.torch", "tokenizers", "transformers", "xml.etree.ElementTree"),
]
#: Seconds that one test may take.
TIMEOUT = 180.0
#: Errors of a mutant that is no program rather than a wrong one, or that had no room.
NO_PROGRAM = (
    *("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError"),
    *("torch.OutOfMemoryError", "MemoryError"),
)


class Outcome(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    BROKEN = "broken"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, why, and how long it took."""

    mutant: Mutant
    outcome: Outcome
    reason: str
    seconds: float


def load(root: Path) -> list[Mutant]:
    """Read the list of mutants of a tree."""
    return list(runpy.run_path(str(root / LIST))["MUTANTS"])


def problems(root: Path, mutants: Sequence[Mutant]) -> Iterator[str]:
    """Say what is wrong with a list of mutants, without running any test."""
    ids = [mutant.id for mutant in mutants]
    yield from (f"{name}: listed twice" for name in set(ids) if ids.count(name) > 1)
    for mutant in mutants:
        if not all((mutant.name, mutant.source, mutant.tests)):
            yield f"{mutant.id}: name, source and tests must not be empty"
        on_gpu = {test.startswith("tests/gpu/") for test in mutant.tests}
        if on_gpu - {mutant.needs_gpu}:
            yield f"{mutant.id}: what needs a GPU has tests in tests/gpu, all else none"
        yield from (f"{mutant.id}: {text}" for text in fault_problems(root, mutant))
        for test in mutant.tests:
            if not has_test(root, test):
                yield f"{mutant.id}: there is no test {test}"


def fault_problems(root: Path, mutant: Mutant) -> Iterator[str]:
    """Say why a fault cannot be put into its file."""
    try:
        text = (root / mutant.file).read_text(encoding="utf-8")
        ast.parse(mutant.apply(text))
    except (OSError, ValueError, SyntaxError) as error:
        yield str(error)
    if mutant.old == mutant.new:
        yield "old and new text are equal"


def has_test(root: Path, test: str) -> bool:
    """Tell whether a test id names a function that stands in its file."""
    file, *_, function = test.partition("[")[0].split("::")
    if not (root / file).is_file():
        return False
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    names = (getattr(node, "name", None) for node in ast.walk(tree))
    return function in names


def copy_tree(root: Path, target: Path) -> None:
    """Copy the files that git tracks or would track, links as links; else all."""
    if not (root / ".git").exists():
        ignored = shutil.ignore_patterns(".venv", ".data")
        shutil.copytree(root, target, True, ignored, dirs_exist_ok=True)
        return
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True)
    for name in sorted({name for name in listed.stdout.decode().split("\0") if name}):
        if (root / name).is_symlink() or (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)


def preload() -> None:
    """Let test processes be forked from one that has imported what all need."""
    # Read once, when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def run_tests(
    tree: Path, tests: Sequence[str], timeout: float, on_gpu: bool = False
) -> tuple[Outcome, str]:
    """Run tests of a tree in a process of their own and read what became of them."""
    with tempfile.TemporaryDirectory(prefix="report-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}"]
        options += ["-m", "gpu"] if on_gpu else []
        process = multiprocessing.get_context("forkserver").Process(
            target=run_pytest, args=(ROOT, tree, [*options, *tests])
        )
        process.start()
        process.join(timeout)
        is_late = process.is_alive()
        stop(process)
        if is_late:
            return Outcome.TIMEOUT, f"no end after {timeout:.0f} s"
        return read_report(report)


def run_pytest(root: Path, tree: Path, arguments: list[str]) -> None:
    """Run tests of a tree, in a process that then knows nothing of the checkout.

    Args:
        root: The checkout.
        tree: The tree.
        arguments: Of pytest.
    """
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    # Whatever the caller's settings: copies of the tree take the bytecode along.
    sys.dont_write_bytecode = False
    sys.path[:] = [str(tree), *(path for path in sys.path if not is_own(path, root))]
    for name in [name for name in sys.modules if is_own_module(name, root)]:
        del sys.modules[name]
    import pytest

    never_shrink()
    sys.exit(pytest.main(arguments))


def never_shrink() -> None:
    """Let property tests fail with the first example that does.

    Profiles inherit from the one that is loaded when they are made.
    """
    with suppress(ImportError):
        from hypothesis import Phase, settings

        settings.register_profile("unshrunk", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("unshrunk")


def is_own_module(name: str, root: Path) -> bool:
    """Tell whether a module, other than the main one, comes from a checkout."""
    spec = getattr(sys.modules[name], "__spec__", None)
    if spec is None or name in ("__main__", "__mp_main__"):
        return False
    places = [spec.origin, *(spec.submodule_search_locations or [])]
    return any(is_own(place, root) for place in places if place)


def is_own(path: str, root: Path) -> bool:
    """Tell whether a path leads into a checkout, but not to what is installed there."""
    return Path(path).is_relative_to(root) and "site-packages" not in path


def stop(process: BaseProcess) -> None:
    """End a process and what it started, if any of it still runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()


def read_report(report: Path) -> tuple[Outcome, str]:
    """Judge a run by its report: a failure is one of a test's own body."""
    if not report.exists():
        return Outcome.BROKEN, "the test runner did not finish"
    cases = list(ElementTree.parse(report).iter("testcase"))
    errors = [node.get("message", "") for case in cases for node in case.iter("error")]
    failures = [
        node.get("message", "") for case in cases for node in case.iter("failure")
    ]
    first = [message.split("\n")[0] for message in failures + errors]
    real = [text for text in first[: len(failures)] if not text.startswith(NO_PROGRAM)]
    if real:
        return Outcome.KILLED, real[0]
    if first:
        return Outcome.BROKEN, first[0]
    ran = [case for case in cases if case.find("skipped") is None]
    if not ran:
        return Outcome.BROKEN, "no test ran"
    return Outcome.SURVIVED, f"{len(ran)} passed"


def try_mutant(clean: Path, mutant: Mutant, timeout: float = TIMEOUT) -> Verdict:
    """Apply a mutant to a copy of a tree; run its tests, up to one that passes."""
    begin = time.perf_counter()
    outcome, reason = Outcome.BROKEN, "no test named"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(clean, tree, symlinks=True)
        write_fault(tree / mutant.file, mutant)
        for test in mutant.tests:
            outcome, reason = run_tests(tree, [test], timeout, mutant.needs_gpu)
            if outcome != Outcome.KILLED:
                reason = f"{test}: {reason}"
                break
    return Verdict(mutant, outcome, reason, time.perf_counter() - begin)


def write_fault(path: Path, mutant: Mutant) -> None:
    """Apply a mutant to a file, whatever was compiled of it before."""
    text = mutant.apply(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def try_unchanged(
    clean: Path, mutants: Sequence[Mutant], jobs: int
) -> tuple[Outcome, str]:
    """Run every named test on a tree without a fault; they should survive.

    What this compiles is compiled for all copies of the tree.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    on_gpu, timeout = mutants[0].needs_gpu, TIMEOUT * len(tests)
    groups = [tests[job::jobs] for job in range(min(jobs, len(tests)))]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(run_tests, clean, group, timeout, on_gpu) for group in groups
        ]
    found = [future.result() for future in futures]
    return next((each for each in found if each[0] != Outcome.SURVIVED), found[0])


def try_all(clean: Path, mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Try mutants, some at a time, under a progress bar; keep their order."""
    verdicts: dict[str, Verdict] = {}
    with Progress() as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("mutants", total=len(mutants))
        for future in as_completed(
            [pool.submit(try_mutant, clean, mutant) for mutant in mutants]
        ):
            verdicts[future.result().mutant.id] = future.result()
            progress.advance(task)
    return [verdicts[mutant.id] for mutant in mutants]


def show(verdicts: Sequence[Verdict]) -> None:
    """Print what became of each mutant."""
    table = Table(title="Mutants", show_lines=False)
    for column in ("id", "fault", "outcome", "seconds", "tests"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        mutant = verdict.mutant
        cells = [mutant.id, mutant.name, verdict.outcome, f"{verdict.seconds:.1f}"]
        table.add_row(*map(escape, (*cells, "\n".join(mutant.tests))))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for verdict in verdicts:
        if verdict.outcome != Outcome.KILLED:
            print(f"{verdict.mutant.id} {verdict.outcome}: {verdict.reason}")
    killed = sum(verdict.outcome == Outcome.KILLED for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} mutants killed")


def run(root: Path, mutants: Sequence[Mutant], jobs: int) -> int:
    """Try mutants and print what became of them; return the exit status."""
    if found := list(problems(root, mutants)):
        print(*found, sep="\n")
        return 1
    if not mutants:
        print("no mutants listed")
        return 0
    with tempfile.TemporaryDirectory(prefix="clean-") as folder:
        clean = Path(folder).resolve()
        copy_tree(root, clean)
        outcome, reason = try_unchanged(clean, mutants, jobs)
        if outcome != Outcome.SURVIVED:
            print(f"the named tests do not pass without a fault: {reason}")
            return 1
        verdicts = try_all(clean, mutants, jobs)
    show(verdicts)
    return int(any(verdict.outcome != Outcome.KILLED for verdict in verdicts))


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Try each known fault.")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--only", action="append", metavar="ID", help="try just this")
    parser.add_argument("--gpu", action="store_true", help="try those a GPU shows")
    options = parser.parse_args()
    listed = load(ROOT)
    mutants = [mutant for mutant in listed if mutant.needs_gpu == options.gpu]
    if options.only:
        if unknown := set(options.only) - {mutant.id for mutant in mutants}:
            parser.error(f"no such mutant here: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.id in options.only]
    preload()
    status = run(ROOT, mutants, options.jobs)
    if not options.gpu:
        left = sum(mutant.needs_gpu for mutant in listed)
        print(f"{left} more need a GPU, and --gpu")
    return status


if __name__ == "__main__":
    sys.exit(main())
