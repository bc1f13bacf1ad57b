"""Change the bookkeeping in every small way and see whether a fast test notices.

    python scripts/mutation.py [--jobs 2] [--module NAME] [--list-survivors]

One process imports everything and collects the tests once. For each mutant it forks;
the child puts the changed module in the place of the real one and runs tests until one
fails. A mutant is *killed* by a failed test, or when it never ends; one that
*survives* needs a reason in ``tests/mutation_survivors.toml``, which must list exactly
those. Types, messages in f-strings and assertions of the code are left alone.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import platform
import re
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SURVIVORS = Path("tests/mutation_survivors.toml")
RESULTS = Path("benchmarks/results/mutation.json")
#: What share of all mutants must be killed.
LEAST = 0.9
#: Seconds of processor time for a mutant: so much, and so many times a clean run.
GRACE, FACTOR = 3, 2

_SPEC = ("kv_blocks", "state_slots")
_TRACES = ("tests/equivalence/test_scheduler.py", "tests/test_cache_model.py")


def _tests(name: str) -> tuple[str, ...]:
    """List the files whose tests must notice, those that say most first."""
    own = (f"tests/spec/test_{name}.py",) if name in _SPEC else ()
    return (*own, f"tests/equivalence/test_{name}.py", *_TRACES)


_BOTH = ("kv_blocks", "state_slots", "prefix_cache", "scheduler")
_POLICY = ("tests/test_policy.py", *_TRACES)
#: The modules, and the files with their tests.
MODULES: dict[str, tuple[str, ...]] = {
    "lockstep/blocks.py": _POLICY,
    "lockstep/policy.py": _POLICY,
    **{f"reference/{name}.py": _tests(name) for name in _BOTH},
    **{f"optimized/{name}.py": _tests(name) for name in _BOTH},
}
#: Tests in these files that need more than the bookkeeping, or that add little.
LEFT_OUT = re.compile(
    r"test_another_policy|test_these_traces|test_the_traces"
    r"|test_any_actions\[(?!0-all)|test_random_traces_agree\[.*[1-9]\]"
)

# Mutants.

_SWAPS: dict[type[Any], type[Any]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
_DELETED = (
    *(ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Raise),
    *(ast.Continue, ast.Break),
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One small change.

    Attributes:
        file: The file, as in `MODULES`.
        function: The function or class that it is in.
        line: Text of its line, or of the first one.
        change: What becomes of what.
        index: Its number within the file.
        number: Number of the line.
    """

    file: str
    function: str
    line: str
    change: str
    index: int
    number: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is known by, wherever its line moves."""
        return self.file, self.function, self.line, self.change


@dataclass
class _Swap:
    """A value somewhere in a syntax tree, to be changed for another and back."""

    holder: Any
    place: str | int
    value: object

    def __call__(self) -> None:
        """Put the one in the place of the other."""
        if isinstance(self.place, int):
            old = self.holder[self.place]
            self.holder[self.place] = self.value
        else:
            old = getattr(self.holder, self.place)
            setattr(self.holder, self.place, self.value)
        self.value = old


@dataclass
class _Site:
    """A change that can be made to a syntax tree in place."""

    node: ast.AST
    function: str
    words: str
    swap: _Swap


def _negations(holder: Any, place: str | int, test: ast.expr) -> Iterator[_Swap]:
    """Yield the negation of a condition, unless that is another change already."""
    is_flip = isinstance(test, ast.Compare) and not isinstance(
        test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE
    )
    if not is_flip and not isinstance(test, ast.Constant | ast.UnaryOp):
        yield _Swap(holder, place, ast.UnaryOp(ast.Not(), test))


def _own_changes(node: ast.AST) -> Iterator[tuple[str, _Swap]]:
    """Yield the changes of one node alone, described by what comes of it."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            made = _SWAPS[type(operator)]()
            yield "", _Swap(node.ops, index, made)
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        if type(node.op) in _SWAPS:
            yield "", _Swap(node, "op", _SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp):
        yield "", _Swap(node, "operand", ast.UnaryOp(node.op, node.operand))
    elif isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield "", _Swap(node, "value", not value)
        elif isinstance(value, int):
            yield "", _Swap(node, "value", value + 1)
        elif isinstance(value, str):
            yield "", _Swap(node, "value", value + "?")
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        for swap in _negations(node, "test", node.test):
            yield "negated", swap
    elif isinstance(node, ast.comprehension):
        for index, test in enumerate(node.ifs):
            for swap in _negations(node.ifs, index, test):
                yield "negated", swap
    elif isinstance(node, ast.Return):
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        if node.value is not None and not is_none:
            yield "returns None", _Swap(node, "value", ast.Constant(None))


def _skipped(node: ast.AST) -> list[ast.AST]:
    """List the parts of a node in which nothing is changed."""
    found: list[ast.AST | None] = []
    if isinstance(node, _Function):
        found += [node.returns, *node.decorator_list]
    elif isinstance(node, ast.ClassDef):
        found += [*node.bases, *node.decorator_list]
    elif isinstance(node, ast.arg | ast.AnnAssign):
        found.append(node.annotation)
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        # A generic such as ``list[int]``; other subscripts have no types in them.
        found += [node.slice] if node.value.id in ("list", "dict", "set") else []
    return [part for part in found if part is not None]


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _sites(node: ast.AST, function: str, inside: bool = False) -> Iterator[_Site]:
    """Yield every change that can be made below a node, in order of the text.

    Args:
        node: Where to look.
        function: The function or class that it is in.
        inside: Whether that is a function.
    """
    skipped = _skipped(node)
    for _name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or child in skipped:
                continue
            if isinstance(child, ast.Assert | ast.JoinedStr | ast.Import):
                continue
            if isinstance(child, ast.stmt) and _is_docstring(child):
                continue
            where = function
            if isinstance(child, _Function | ast.ClassDef):
                where = f"{function}.{child.name}".lstrip(".")
            if inside and isinstance(child, _DELETED):
                yield _Site(child, where, "deleted", _Swap(value, index, ast.Pass()))
            for words, swap in _own_changes(child):
                yield _Site(child, where, words, swap)
            yield from _sites(child, where, inside or isinstance(child, _Function))


def _describe(site: _Site) -> str:
    """Say what becomes of what."""
    if site.words == "deleted":
        return site.words
    if isinstance(site.node, ast.If | ast.While | ast.IfExp):
        return f"{ast.unparse(site.node.test)}: {site.words}"
    before = ast.unparse(site.node).strip()
    if site.words:
        return f"{before}: {site.words}"
    site.swap()
    after = ast.unparse(site.node)
    site.swap()
    return f"{before} -> {after}"


def mutants_of(file: str, text: str) -> list[Mutant]:
    """List every mutant of a file, in order of its lines."""
    lines, seen = text.splitlines(), Counter[tuple[str, ...]]()
    found: list[Mutant] = []
    for index, site in enumerate(_sites(ast.parse(text), "")):
        number = _line_of(site.node)
        change, line = _describe(site), lines[number - 1].strip()
        seen[site.function, line, change] += 1
        if (times := seen[site.function, line, change]) > 1:
            change = f"{change} ({times})"
        found.append(Mutant(file, site.function, line, change, index, number))
    return found


def _line_of(node: ast.AST) -> int:
    """Return the first line of a node, or of what is in it."""
    return min(getattr(child, "lineno", sys.maxsize) for child in ast.walk(node))


def compile_mutant(text: str, index: int, path: str) -> CodeType:
    """Compile a file with one of its mutants."""
    tree = ast.parse(text)
    next(site for at, site in enumerate(_sites(tree, "")) if at == index).swap()
    return compile(ast.fix_missing_locations(tree), path, "exec")


def install(module: ModuleType, code: CodeType) -> None:
    """Run changed code in a module, and hand its new objects to all that had the old.

    Args:
        module: Changed, and so are the modules that import from it.
        code: Its code.
    """
    before = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        or isinstance(value, bytes)
    }
    exec(code, module.__dict__)
    new = {id(value): vars(module)[name] for name, value in before.items()}
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith(("lockstep", "tests")):
            for name, value in list(vars(other).items()):
                if id(value) in new and value is not new[id(value)]:
                    setattr(other, name, new[id(value)])


# Trying them.


@dataclass
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: Which.
        killer: The test that failed, or why there was none to fail; empty when it
            survived.
        seconds: How long it took.
    """

    mutant: Mutant
    killer: str
    seconds: float


class Runner:
    """A plugin of pytest that runs the collected tests once for each mutant."""

    def __init__(self, files: Sequence[str], jobs: int, only: set[str] | None) -> None:
        """Note what is to be done; see `try_all`."""
        self.files = files
        self.jobs = jobs
        self.only = only
        self.failed = ""
        self.broken: list[str] = []
        self.verdicts: list[Verdict] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the first test that fails."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run everything without a fault, then with each mutant."""
        # What is there stays, so that no child copies it to mark it.
        gc.freeze()
        work: list[tuple[Mutant, list[Any], float]] = []
        for file in self.files:
            items = select(session.items, file)
            begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            failed = self._wait(self._start(None, items, 600)) if items else "no tests"
            if failed:
                self.broken.append(f"{file}: {failed}")
                continue
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
            limit = GRACE + FACTOR * used
            text = (ROOT / file).read_text(encoding="utf-8")
            work += [
                (mutant, items, limit)
                for mutant in mutants_of(file, text)
                if self.only is None or show(mutant.key) in self.only
            ]
        if not self.broken:
            self._try_all(work)
        return True

    def _try_all(self, work: list[tuple[Mutant, list[Any], float]]) -> None:
        """Keep some children busy until all mutants are tried."""
        running: dict[int, tuple[Mutant, int, float]] = {}
        with Progress(console=Console(file=sys.__stderr__)) as progress:
            task = progress.add_task("mutants", total=len(work))
            for mutant, items, limit in [*work, *[(None, [], 0.0)] * self.jobs]:
                if len(running) == self.jobs or (mutant is None and running):
                    pid, status = os.wait()
                    done, pipe, begin = running.pop(pid)
                    killer = self._read(pipe, status)
                    seconds = time.perf_counter() - begin
                    self.verdicts.append(Verdict(done, killer, seconds))
                    progress.advance(task)
                if mutant is not None:
                    pid, pipe = self._start(mutant, items, limit)
                    running[pid] = mutant, pipe, time.perf_counter()
        self.verdicts.sort(key=lambda verdict: verdict.mutant.number)
        self.verdicts.sort(key=lambda verdict: self.files.index(verdict.mutant.file))

    def _start(
        self, mutant: Mutant | None, items: list[Any], limit: float
    ) -> tuple[int, int]:
        """Fork a child that runs tests; return its id, and where to read of it."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            os.close(writing)
            return pid, reading
        try:
            self._be_child(mutant, items, limit)
            os.write(writing, self.failed.encode())
        except BaseException as error:
            os.write(writing, f"cannot be loaded: {type(error).__name__}".encode())
        finally:
            os._exit(0)

    def _be_child(self, mutant: Mutant | None, items: list[Any], limit: float) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silence, stream)
        seconds = int(limit)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        if mutant is not None:
            module = module_of(mutant.file)
            path = ROOT / mutant.file
            text = path.read_text(encoding="utf-8")
            install(module, compile_mutant(text, mutant.index, str(path)))
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                return

    def _wait(self, child: tuple[int, int]) -> str:
        pid, pipe = child
        _, status = os.waitpid(pid, 0)
        return self._read(pipe, status)

    def _read(self, pipe: int, status: int) -> str:
        """Read what a child says of itself; one that was ended cannot."""
        with os.fdopen(pipe) as stream:
            said = stream.read()
        return "never ends" if os.WIFSIGNALED(status) else said


def module_of(file: str) -> ModuleType:
    """Import the module of a file, under the one name that it has."""
    path = file if file.startswith("lockstep/") else f"lockstep/{file}"
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


def select(items: Sequence[Any], file: str) -> list[Any]:
    """Pick the tests of a file's mutants, in the order of `MODULES`."""
    side, other = file.split("/")[0], ""
    if side in ("reference", "optimized"):
        other = "optimized" if side == "reference" else "reference"
    found: list[Any] = []
    for path in MODULES[file]:
        for item in items:
            name = item.nodeid
            is_other = "/equivalence/" not in name and other and f"[{other}" in name
            if name.startswith(path) and not is_other and not LEFT_OUT.search(name):
                found.append(item)
    return found


def try_all(files: Sequence[str], jobs: int, only: set[str] | None) -> Runner:
    """Collect the tests in this process, then try every mutant.

    Args:
        files: The files to mutate.
        jobs: How many mutants at a time.
        only: The mutants to try, as `show` writes them; all when None.
    """
    # Shapes need not be checked of what has no tensors, and shrinking says no more.
    sys.modules["beartype"] = None  # type: ignore[assignment]
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    import pytest
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutation",
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    runner = Runner(files, jobs, only)
    paths = dict.fromkeys(path for file in files for path in MODULES[file])
    options = ["-q", "--no-header", "-s", "--assert=plain", "-p", "no:cacheprovider"]
    options += ["-p", "no:xdist"]
    status = pytest.main([*options, *paths], plugins=[runner])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        runner.broken.append(f"tests cannot be collected: {status}")
    return runner


# Survivors.


def load_survivors() -> dict[tuple[str, str, str, str], str]:
    """Read the reasons why mutants may survive, by the mutants' keys."""
    text = (ROOT / SURVIVORS).read_text(encoding="utf-8")
    entries: list[dict[str, str]] = tomllib.loads(text).get("survivor", [])
    return {
        (each["file"], each["function"], each["line"], each["change"]): each["reason"]
        for each in entries
    }


def problems(verdicts: Sequence[Verdict], files: Sequence[str]) -> list[str]:
    """Compare survivors with their list, which must name exactly these."""
    survived = {verdict.mutant.key for verdict in verdicts if not verdict.killer}
    listed = {key for key in load_survivors() if key[0] in files}
    return [
        *(f"survives without a reason: {show(key)}" for key in survived - listed),
        *(f"listed, but was killed: {show(key)}" for key in listed - survived),
    ]


def show(key: tuple[str, str, str, str]) -> str:
    """Write a mutant's key in one line."""
    file, function, line, change = key
    return f"{file} {function}: {line!r}: {change}"


def load_results() -> dict[str, Any]:
    """Read what the latest runs gave; nothing before the first."""
    path = ROOT / RESULTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def merged(
    known: dict[str, Any], verdicts: Sequence[Verdict], is_again: bool
) -> dict[str, Any]:
    """Put new verdicts in the place of older ones, file by file.

    Args:
        known: What earlier runs gave.
        verdicts: Those of one run.
        is_again: Whether only earlier survivors were tried; the rest stays killed.
    """
    files: dict[str, Any] = dict(known.get("files", {}))
    for file in dict.fromkeys(verdict.mutant.file for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.mutant.file == file]
        survivors = [show(each.mutant.key) for each in mine if not each.killer]
        count = files[file]["mutants"] if is_again else len(mine)
        files[file] = {
            "mutants": count,
            "killed": count - len(survivors),
            "survivors": survivors,
        }
    total, killed = (
        sum(entry[name] for entry in files.values()) for name in ("mutants", "killed")
    )
    return {
        "python": platform.python_version(),
        "mutants": total,
        "killed": killed,
        "share_killed": round(killed / max(1, total), 4),
        "files": {file: files[file] for file in MODULES if file in files},
    }


def print_table(result: dict[str, Any]) -> None:
    """Print what became of the mutants, file by file."""
    table = Table(title="Mutants of the bookkeeping")
    for column in ("file", "mutants", "killed", "survived"):
        table.add_column(column, justify="left" if column == "file" else "right")
    for file, entry in result["files"].items():
        count, killed = entry["mutants"], entry["killed"]
        table.add_row(file, str(count), str(killed), str(count - killed))
    Console().print(table)
    print(f"{result['share_killed']:.1%} of {result['mutants']} mutants killed")


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Mutate the bookkeeping.")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--module", action="append", help="only files with this name")
    parser.add_argument("--again", action="store_true", help="only last survivors")
    parser.add_argument("--list-survivors", action="store_true", help="print each one")
    options = parser.parse_args()
    wanted = options.module or [""]
    files = [file for file in MODULES if any(name in file for name in wanted)]
    known = load_results()
    only = {
        text for entry in known.get("files", {}).values() for text in entry["survivors"]
    }
    runner = try_all(files, options.jobs, only if options.again else None)
    if runner.broken:
        print(*runner.broken, sep="\n")
        return 1
    result = merged(load_results(), runner.verdicts, options.again)
    print_table(result)
    if options.list_survivors:
        for verdict in runner.verdicts:
            if not verdict.killer:
                mutant = verdict.mutant
                print(f"{mutant.file}:{mutant.number} {mutant.function}")
                print(f"    {mutant.line}\n    {mutant.change}")
    text = json.dumps(result, indent=2) + "\n"
    (ROOT / RESULTS).write_text(text, encoding="utf-8")
    found = problems(runner.verdicts, files)
    print(*found, sep="\n")
    return int(bool(found) or result["share_killed"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
