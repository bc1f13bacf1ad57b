"""Count lines by group, and hold them to their limits with ``--check``.

A *code* line carries at least one token that is neither comment nor docstring; blank
lines count nowhere. Imports have a column of their own: they say where a name comes
from, and a reader passes over them. The length of a function is its code lines from
``def`` on, without decorators and docstring; a nested function counts in itself and in
what holds it.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

CORE = (
    "engine",
    "scheduler",
    "kv_blocks",
    "state_slots",
    "prefix_cache",
    "metadata",
    "snapshots",
)
#: Command-line tools.
TOOLS = ("__main__", "cli", "demo", "exercise", "ladder", "verify")
#: What people call, how models get in, and the table of the ladder's rungs, which docs
#: and tests read, too: of no interest to either side.
FRONT = (
    "__init__",
    "assemble",
    "chat",
    "families",
    "llm",
    "rungs",
    "stream",
    "tokenizer",
    "weights",
)

#: Functions longer than the limit: "path:name", and why each may be.
ALLOWED: dict[str, str] = {}

#: What can have a docstring.
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: Tokens that make no line a code line.
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Counts:
    """Lines of one file or of a group of files."""

    files: int = 0
    code: int = 0
    imports: int = 0
    docstrings: int = 0
    comments: int = 0
    functions: dict[str, int] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        """Take in the lines of another."""
        self.files += other.files
        self.code += other.code
        self.imports += other.imports
        self.docstrings += other.docstrings
        self.comments += other.comments
        self.functions |= other.functions

    @property
    def median_function(self) -> float:
        """Half of the functions are at most this long."""
        return median(self.functions.values()) if self.functions else 0

    @property
    def longest_function(self) -> int:
        """Length of the longest function."""
        return max(self.functions.values(), default=0)

    @property
    def docstring_share(self) -> float:
        """Docstring lines per 100 code lines."""
        return 100 * self.docstrings / self.code if self.code else 0


@dataclass(frozen=True)
class Group:
    """Files counted together, and what they must keep to; None is no limit."""

    name: str
    folder: str
    holds: Callable[[Path], bool]
    most_code: int | None = None
    most_median: int | None = None
    most_function: int | None = None
    least_docstrings: int | None = None


def is_tool(path: Path) -> bool:
    """Tell whether a file is one of the tools, or below one."""
    return path.parts[0].removesuffix(".py") in TOOLS


def is_front(path: Path) -> bool:
    """Tell whether a file is part of what people call."""
    return len(path.parts) == 1 and path.stem in FRONT


def is_shared(path: Path) -> bool:
    """Tell whether a file is vocabulary of both sides."""
    return not is_tool(path) and not is_front(path)


def is_kernel(path: Path) -> bool:
    """Tell whether a file is below a folder of kernels."""
    return "kernels" in path.parts


def is_anything(path: Path) -> bool:
    """Take every file."""
    return True


GROUPS = (
    Group("reference: core", "reference", lambda path: path.stem in CORE, 1500),
    Group("reference: all", "reference", is_anything, 2500, 10, 50, 40),
    Group("lockstep: tools", "lockstep", is_tool, 2095, 10, 50),
    Group("lockstep: front", "lockstep", is_front, 1160, 10, 50),
    Group("lockstep: shared", "lockstep", is_shared, 1540, 10, 50),
    Group(
        "optimized: torch", "optimized", lambda path: not is_kernel(path), 3500, 10, 50
    ),
    Group("optimized: kernels", "optimized", is_kernel, 1800),
    Group("tests", "tests", is_anything),
    Group("training", "training", is_anything),
    Group("scripts", "scripts", is_anything),
)


def docstring_nodes(tree: ast.Module) -> Iterator[ast.expr]:
    """Find the docstrings of a module and of all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, HOLDERS) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first.value


def lines_of(node: ast.expr | ast.stmt) -> range:
    """List the lines that a node stands on."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def count_text(text: str, name: str) -> Counts:
    """Count the lines of one source text."""
    tree = ast.parse(text)
    in_docstrings = {n for node in docstring_nodes(tree) for n in lines_of(node)}
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type not in SILENT:
            code |= set(lines) - in_docstrings
        elif token.type == tokenize.COMMENT:
            comments |= set(lines)
    source = text.splitlines()
    blank = {number for number, line in enumerate(source, 1) if not line.strip()}
    code -= blank
    imports = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in lines_of(node)
    }
    functions = {
        f"{name}:{node.name}@{node.lineno}": len(code & set(lines_of(node)))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    docstrings = len(in_docstrings - blank)
    return Counts(
        files=1,
        code=len(code - imports),
        imports=len(imports),
        docstrings=docstrings,
        comments=len(comments - code),
        functions=functions,
    )


def count_group(root: Path, group: Group) -> Counts:
    """Count the files of a group; linked folders belong to another."""
    total = Counts()
    folder = root / group.folder
    for path in sorted(folder.rglob("*.py")):
        below = path.relative_to(folder)
        linked = any((folder / parent).is_symlink() for parent in below.parents)
        if not linked and group.holds(below):
            name = path.relative_to(root).as_posix()
            total.add(count_text(path.read_text(encoding="utf-8"), name))
    return total


def without_line(function: str) -> str:
    """Name a function without its line, as the table of exceptions does."""
    return function.rpartition("@")[0]


def broken_limits(
    group: Group, counts: Counts, allowed: dict[str, str] = ALLOWED
) -> Iterator[str]:
    """Say which limits a group breaks."""
    if group.most_code is not None and counts.code > group.most_code:
        yield f"{group.name}: {counts.code} code lines, at most {group.most_code}"
    if group.most_median is not None and counts.median_function > group.most_median:
        found = counts.median_function
        yield f"{group.name}: median function {found}, at most {group.most_median}"
    share, least = counts.docstring_share, group.least_docstrings
    if least is not None and counts.code and share < least:
        yield f"{group.name}: {share:.0f} docstring lines per 100 code, least {least}"
    for function, length in counts.functions.items():
        too_long = group.most_function is not None and length > group.most_function
        if too_long and without_line(function) not in allowed:
            yield f"{function}: {length} lines, at most {group.most_function}"


def unneeded_exceptions(
    counted: list[tuple[Group, Counts]], allowed: dict[str, str] = ALLOWED
) -> Iterator[str]:
    """Say which entries of the table of exceptions nothing needs."""
    long = {
        without_line(function)
        for group, counts in counted
        for function, length in counts.functions.items()
        if group.most_function is not None and length > group.most_function
    }
    for name in sorted(set(allowed) - long):
        yield f"{name}: not too long (any more); take it off the table"


def show(counted: list[tuple[Group, Counts]]) -> None:
    """Print the table."""
    table = Table(title="Lines")
    for column in ("group", "files", "code", "limit", "imports", "docstrings"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for column in ("per 100", "comments", "functions", "median", "longest"):
        table.add_column(column, justify="right")
    for group, counts in counted:
        cells = [counts.files, counts.code, group.most_code or ""]
        cells += [counts.imports, counts.docstrings, round(counts.docstring_share)]
        cells += [counts.comments]
        cells += [len(counts.functions), f"{counts.median_function:g}"]
        table.add_row(group.name, *map(str, [*cells, counts.longest_function]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> int:
    """Print the counts; with ``--check``, fail where a limit is broken."""
    parser = argparse.ArgumentParser(description="Count lines by group.")
    parser.add_argument("--check", action="store_true", help="fail on a broken limit")
    check = parser.parse_args().check
    counted = [(group, count_group(ROOT, group)) for group in GROUPS]
    counted = [(group, counts) for group, counts in counted if counts.files]
    show(counted)
    problems = [text for pair in counted for text in broken_limits(*pair)]
    problems += unneeded_exceptions(counted)
    for problem in dict.fromkeys(problems):
        print(problem)
    return 1 if problems and check else 0


if __name__ == "__main__":
    sys.exit(main())
