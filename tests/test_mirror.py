"""The two sides must offer the same modules, names, order and signatures."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.assemble import KERNELS
from lockstep.interfaces import component_keys

ROOT = Path(__file__).resolve().parents[1]

#: Modules that one side has alone, each with the reason.
ONLY: dict[str, dict[str, str]] = {
    "reference": {
        "rows.py": "plain numbers for loops; the optimized side never reads these "
        "arrays on the host"
    },
    "optimized": {
        "buffers.py": "the reference side sends each array by itself",
        "graphs.py": "padded shapes and replay have no eager twin",
        "packages.py": "launchers of kernels that other packages have",
        "streams.py": "a loop does one thing after the other",
    },
}

#: Modules of the reference whose twin is still to come; empty when the mirror is whole.
PENDING: set[str] = set()

#: Folders of the optimized side that hold kernels, which have no eager twin.
EXEMPT_FOLDERS = ("kernels",)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path, side: str) -> set[str]:
    """List the modules of a side, as paths below its folder."""
    paths = {path.relative_to(root / side) for path in (root / side).rglob("*.py")}
    return {path.as_posix() for path in paths if path.parts[0] not in EXEMPT_FOLDERS}


def is_public(name: str) -> bool:
    """Tell whether callers see a name; ``__post_init__`` only serves ``__init__``."""
    is_special = name.startswith("__") and name.endswith("__")
    return (is_special and name != "__post_init__") or not name.startswith("_")


def decorated(node: ast.ClassDef | Function, text: str) -> str:
    """Put the decorators of a definition before its text."""
    return "".join(f"@{ast.unparse(d)} " for d in node.decorator_list) + text


def function_entry(node: Function, prefix: str) -> str:
    """Render a function with decorators, arguments, defaults and result."""
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{kind}{prefix}{node.name}({ast.unparse(node.args)}){returns}"
    return decorated(node, text)


def class_entries(node: ast.ClassDef, prefix: str) -> list[str]:
    """Render a class with decorators and bases, then all that it defines."""
    inherited = [*node.bases, *(keyword.value for keyword in node.keywords)]
    bases = ", ".join(ast.unparse(base) for base in inherited)
    head = decorated(node, f"class {prefix}{node.name}({bases})")
    return [head, *entries(node.body, f"{prefix}{node.name}.")]


def value_entries(node: ast.Assign | ast.AnnAssign, prefix: str) -> Iterator[str]:
    """Render the public constants or fields that an assignment makes."""
    kind = (
        f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    )
    value = f" = {ast.unparse(node.value)}" if node.value else ""
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    for target in targets:
        if isinstance(target, ast.Name) and is_public(target.id):
            yield f"{prefix}{target.id}{kind}{value}"


def entries(body: list[ast.stmt], prefix: str) -> list[str]:
    """Render the public definitions among some statements, in order."""
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            found += class_entries(node, prefix)
        elif isinstance(node, Function) and is_public(node.name):
            found.append(function_entry(node, prefix))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found += value_entries(node, prefix)
        elif isinstance(node, ast.If | ast.Try):
            found += entries([*node.body, *node.orelse], prefix)
    return found


def interface(path: Path) -> list[str]:
    """List all that a module offers, one line each, in order."""
    return entries(ast.parse(path.read_text(encoding="utf-8")).body, "")


def unmatched(
    root: Path, only: dict[str, dict[str, str]], pending: set[str]
) -> list[str]:
    """List modules that lack a twin without leave, and leave that is not needed."""
    reference, optimized = modules(root, "reference"), modules(root, "optimized")
    missing = reference - optimized - pending - set(only["reference"])
    extra = optimized - reference - set(only["optimized"])
    landed, gone = pending & optimized, pending - reference
    unneeded = (set(only["reference"]) | set(only["optimized"])) & reference & optimized
    return [
        *(f"optimized/{name} is missing" for name in sorted(missing)),
        *(f"reference/{name} is missing" for name in sorted(extra)),
        *(f"{name} has landed: take it off PENDING" for name in sorted(landed)),
        *(f"reference/{name} is gone: take it off PENDING" for name in sorted(gone)),
        *(f"{name} is on both sides: take it off ONLY" for name in sorted(unneeded)),
    ]


def shared(root: Path) -> list[str]:
    """List the modules that both sides have."""
    return sorted(modules(root, "reference") & modules(root, "optimized"))


def test_every_module_has_its_twin() -> None:
    """No module stands alone unless a list says why."""
    assert unmatched(ROOT, ONLY, PENDING) == []


def test_modules_that_stand_alone_exist_and_have_a_reason() -> None:
    """The list of modules without a twin does not outlive them."""
    for side, reasons in ONLY.items():
        assert set(reasons) <= modules(ROOT, side)
        assert all(reasons.values())


@pytest.mark.parametrize("name", shared(ROOT))
def test_twins_offer_the_same(name: str) -> None:
    """Twins agree on names, order, signatures, fields, values and bases."""
    assert interface(ROOT / "reference" / name) == interface(ROOT / "optimized" / name)


def signature(root: Path, place: str) -> list[str]:
    """Render the function that a place, such as ``kernels.norm:rms_norm``, names."""
    module, _, symbol = place.partition(":")
    found = interface(root / "optimized" / f"{module.replace('.', '/')}.py")
    return [entry for entry in found if entry.startswith(f"{symbol}(")]


@pytest.mark.parametrize(
    ("key", "place"),
    sorted({pair for places in KERNELS.values() for pair in places.items()}),
)
def test_launchers_have_the_signatures_of_their_twins(key: str, place: str) -> None:
    """A kernel takes the place of a component, so it is called in the same way."""
    assert key in component_keys()
    launcher = signature(ROOT, place)
    assert len(launcher) == 1
    assert launcher == signature(ROOT, key.replace(".", ":"))


# The lint itself, on toy trees.

TOY = '''
"""A toy module."""
from dataclasses import dataclass

LIMIT: int = 4
_HIDDEN = 1


@dataclass(frozen=True)
class Pool(Base):
    """A pool."""

    size: int
    free: list[int] | None = None

    def take(self, count: int, *, pinned: bool = False) -> list[int]:
        """Take some."""
        return _helper(count)


async def serve(pool: Pool, port: int = 80) -> None:
    """Serve."""


def _helper(count):
    return []
'''

#: A change of the fast side that nobody may make alone: old text, new text.
CHANGES = {
    "swapped arguments": ("pool: Pool, port: int = 80", "port: int, pool: Pool = None"),
    "extra argument": ("*, pinned", "row: int, *, pinned"),
    "missing field": ("    size: int\n", ""),
    "changed field type": ("size: int\n", "size: float\n"),
    "changed field default": ("| None = None", "| None = ()"),
    "changed default": ("pinned: bool = False", "pinned: bool = True"),
    "changed result": ("-> list[int]:", "-> tuple[int, ...]:"),
    "changed decorator": ("@dataclass(frozen=True)", "@dataclass"),
    "changed base": ("class Pool(Base)", "class Pool(Other)"),
    "changed constant": ("LIMIT: int = 4", "LIMIT: int = 8"),
    "no longer async": ("async def serve", "def serve"),
    "new public function": ("def _helper(count):", "def helper(count):"),
    "renamed method": ("def take(", "def grab("),
}


def toy_tree(folder: Path, optimized: dict[str, str]) -> Path:
    """Write a tree whose reference has ``pool.py`` and whose fast side is as given."""
    for side, files in {"reference": {"pool.py": TOY}, "optimized": optimized}.items():
        for name, text in files.items():
            (folder / side / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / side / name).write_text(text, encoding="utf-8")
    return folder


NOTHING: dict[str, dict[str, str]] = {"reference": {}, "optimized": {}}


def test_lint_accepts_private_differences(tmp_path: Path) -> None:
    """Private names, bodies and docstrings may differ."""
    fast = TOY.replace("_HIDDEN = 1", "_OTHER = 2").replace("A pool.", "Faster.")
    tree = toy_tree(tmp_path, {"pool.py": fast, "kernels/scan.py": "X = 1"})
    assert unmatched(tree, NOTHING, set()) == []
    assert shared(tree) == ["pool.py"]
    assert interface(tree / "reference/pool.py") == interface(
        tree / "optimized/pool.py"
    )


@pytest.mark.parametrize("change", CHANGES)
def test_lint_sees(change: str, tmp_path: Path) -> None:
    """Each public difference is one."""
    old, new = CHANGES[change]
    assert TOY.count(old) == 1
    tree = toy_tree(tmp_path, {"pool.py": TOY.replace(old, new)})
    assert interface(tree / "reference/pool.py") != interface(
        tree / "optimized/pool.py"
    )


def test_lint_sees_changed_order(tmp_path: Path) -> None:
    """The same names in another order are a difference."""
    tree = toy_tree(tmp_path, {"pool.py": "def b(): ...\ndef a(): ...\n"})
    (tree / "reference/pool.py").write_text("def a(): ...\ndef b(): ...\n")
    assert interface(tree / "reference/pool.py") != interface(
        tree / "optimized/pool.py"
    )


def test_lint_sees_modules_without_twin(tmp_path: Path) -> None:
    """A module on one side alone needs a place on a list, and only then."""
    tree = toy_tree(tmp_path, {"graphs.py": ""})
    only = {"reference": {}, "optimized": {"graphs.py": "no eager twin"}}
    assert len(unmatched(tree, NOTHING, set())) == 2
    assert unmatched(tree, only, {"pool.py"}) == []


def test_lint_sees_lists_that_are_out_of_date(tmp_path: Path) -> None:
    """A module that has landed leaves the lists."""
    tree = toy_tree(tmp_path, {"pool.py": TOY})
    only = {"reference": {"pool.py": "no fast form"}, "optimized": {}}
    assert len(unmatched(tree, NOTHING, {"pool.py"})) == 1
    assert len(unmatched(tree, NOTHING, {"gone.py"})) == 1
    assert len(unmatched(tree, only, set())) == 1
