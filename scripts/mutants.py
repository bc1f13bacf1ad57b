"""Apply each known fault to a copy of the tree and see its test fail.

    python scripts/mutants.py [--jobs 2] [--only M3 --only M7]

The faults stand in ``tests/mutants.toml``. One counts as *killed* when each test that
it names fails in its own body, by an assertion or an error of the engine. A test that
passes lets it *survive*; one that cannot even be collected or whose code cannot be
imported says nothing (*broken*), nor does one that never ends (*timeout*).
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutants.toml")
#: Seconds that one test may take.
TIMEOUT = 180.0
#: Errors of a mutant that is no program rather than a wrong one.
NO_PROGRAM = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")


class Outcome(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    BROKEN = "broken"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that must see it.

    Attributes:
        id: Short name.
        name: What is wrong, in words.
        file: Path of the file below the root.
        old: Text that stands in the file exactly once.
        new: What the fault puts in its place.
        tests: Ids of the tests, each of which must fail.
        source: Where such a fault is publicly known from.
    """

    id: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    source: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            ValueError: The old text does not stand there exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its old text stands {count} times")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, why, and how long it took."""

    mutant: Mutant
    outcome: Outcome
    reason: str
    seconds: float


def load(root: Path) -> list[Mutant]:
    """Read the list of mutants.

    Raises:
        ValueError: An entry that lacks a field or has an unknown one.
    """
    text = (root / LIST).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = tomllib.loads(text).get("mutant", [])
    wanted = {entry.name for entry in fields(Mutant)}
    for entry in entries:
        if wrong := wanted ^ set(entry):
            named = entry.get("id", "an entry without id")
            raise ValueError(f"{named}: missing or unknown fields {sorted(wrong)}")
        entry["tests"] = tuple(entry["tests"])
    return [Mutant(**entry) for entry in entries]


def problems(root: Path, mutants: Sequence[Mutant]) -> Iterator[str]:
    """Say what is wrong with a list of mutants, without running any test."""
    ids = [mutant.id for mutant in mutants]
    yield from (f"{name}: listed twice" for name in set(ids) if ids.count(name) > 1)
    for mutant in mutants:
        if not all((mutant.name, mutant.source, mutant.tests)):
            yield f"{mutant.id}: name, source and tests must not be empty"
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
    """Copy the files that git tracks or would track, links as links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True)
    for name in sorted({name for name in listed.stdout.decode().split("\0") if name}):
        if (root / name).is_symlink() or (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)


def run_test(tree: Path, tests: Sequence[str], timeout: float) -> tuple[Outcome, str]:
    """Run tests of a tree in a fresh process and read what became of them."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return Outcome.TIMEOUT, f"no end after {timeout:.0f} s"
    finally:
        stop(process)
    return read_report(report)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, if any of it still runs."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


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


def try_mutant(root: Path, mutant: Mutant, timeout: float = TIMEOUT) -> Verdict:
    """Apply a mutant to a copy and run its tests, up to one that does not fail."""
    begin = time.perf_counter()
    outcome, reason = Outcome.BROKEN, "no test named"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve()
        copy_tree(root, tree)
        path = tree / mutant.file
        path.write_text(
            mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8"
        )
        for test in mutant.tests:
            outcome, reason = run_test(tree, [test], timeout)
            if outcome != Outcome.KILLED:
                reason = f"{test}: {reason}"
                break
    return Verdict(mutant, outcome, reason, time.perf_counter() - begin)


def try_unchanged(root: Path, mutants: Sequence[Mutant]) -> tuple[Outcome, str]:
    """Run every named test on a copy without a fault; they should survive."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve()
        copy_tree(root, tree)
        return run_test(tree, tests, TIMEOUT * len(tests))


def try_all(root: Path, mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Try mutants, some at a time, under a progress bar; keep their order."""
    verdicts: dict[str, Verdict] = {}
    with Progress() as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("mutants", total=len(mutants))
        for future in as_completed(
            [pool.submit(try_mutant, root, mutant) for mutant in mutants]
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
        table.add_row(*cells, "\n".join(mutant.tests))
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
    outcome, reason = try_unchanged(root, mutants)
    if outcome != Outcome.SURVIVED:
        print(f"the named tests do not pass without a fault: {reason}")
        return 1
    verdicts = try_all(root, mutants, jobs)
    show(verdicts)
    return int(any(verdict.outcome != Outcome.KILLED for verdict in verdicts))


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Try each known fault.")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--only", action="append", metavar="ID", help="try just this")
    options = parser.parse_args()
    mutants = load(ROOT)
    if options.only:
        if unknown := set(options.only) - {mutant.id for mutant in mutants}:
            parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.id in options.only]
    return run(ROOT, mutants, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
