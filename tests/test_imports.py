"""What may import what, seen from fresh processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Third-party packages that are enough for either side.
ENOUGH = ("torch", "numpy", "jaxtyping")

#: Modules of the package that know a side, and so are no vocabulary.
CHOOSERS = {
    "__init__",
    "__main__",
    "assemble",
    "cli",
    "demo",
    "exercise",
    "ladder",
    "verify",
}

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
package = importlib.import_module({package!r})
found = [package.__name__]
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if ".kernels" not in module.name:
        importlib.import_module(module.name)
        found.append(module.name)
assert not {{"reference", "optimized"}} & set(sys.modules), "a module with two names"
print(len(found))
"""


def run_fresh(code: str, folder: Path) -> str:
    """Run code in a new process that finds the checkout, from another folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def normal(name: str) -> str:
    """Spell a distribution's name as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """List distributions and all that they need, extras left out."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = normal(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        plain = [text for text in needed if "extra ==" not in text]
        waiting += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in plain]
    return seen


def blocked_packages() -> list[str]:
    """List the installed import names that a side must do without."""
    enough = with_dependencies(ENOUGH)
    owners = packages_distributions()
    others = [
        name for name, dists in owners.items() if not enough & {*map(normal, dists)}
    ]
    return sorted({*others, "triton", "transformers"} - {"lockstep"})


def test_the_blocked_packages_are_those_meant() -> None:
    """The list is neither empty nor too long."""
    blocked = set(blocked_packages())
    assert {"transformers", "tokenizers", "safetensors", "rich", "pytest"} <= blocked
    assert not {"torch", "numpy", "jaxtyping", "sympy", "typing_extensions"} & blocked


@pytest.mark.parametrize("folder", ["reference", "optimized"])
def test_side_imports_with_torch_alone(folder: str, tmp_path: Path) -> None:
    """Torch, numpy and jaxtyping are enough for every module but the kernels."""
    package = f"lockstep.{folder}"
    code = IMPORT_ALL.format(blocked=blocked_packages(), package=package)
    assert int(run_fresh(code, tmp_path)) >= len(list((ROOT / folder).glob("*.py")))


def test_package_import_is_light(tmp_path: Path) -> None:
    """Importing the package loads no third-party package at all."""
    code = "import sys; import lockstep; print(*sys.modules)"
    loaded = set(run_fresh(code, tmp_path).split())
    assert "lockstep" in loaded
    assert not {"torch", "numpy", "transformers", "jaxtyping", "rich"} & loaded


def test_vocabulary_contract_is_whole() -> None:
    """The import contract names every module that picks no side."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    vocabulary = next(c for c in contracts if "vocabulary" in c["name"])
    modules = {path.stem for path in (ROOT / "lockstep").glob("*.py")} - CHOOSERS
    listed = {name.removeprefix("lockstep.") for name in vocabulary["source_modules"]}
    assert listed == modules


@pytest.mark.parametrize("folder", ["reference", "optimized"])
def test_side_has_one_name(folder: str) -> None:
    """The linter refuses the name that a checkout would also offer."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "-"]
    code = f"from {folder} import scan\n"
    done = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True)
    assert "TID251" in done.stdout
