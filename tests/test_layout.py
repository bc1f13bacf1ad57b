"""The repository and what is built from it hold the real files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("reference", "optimized")


@pytest.mark.parametrize("folder", SIDES)
def test_side_is_linked_into_the_package(folder: str) -> None:
    """A checkout without symlinks holds a text file here; see CONTRIBUTING.md."""
    assert (ROOT / "lockstep" / folder).is_dir()
    assert (ROOT / "lockstep" / folder).resolve() == ROOT / folder


def shipped() -> set[str]:
    """List what a distribution must hold."""
    sources = [path for side in SIDES for path in (ROOT / side).rglob("*.py")]
    names = {f"lockstep/{path.relative_to(ROOT).as_posix()}" for path in sources}
    package = [*(ROOT / "lockstep").glob("*.py"), ROOT / "lockstep" / "py.typed"]
    package += [path for path in (ROOT / "lockstep/demo_model").iterdir()]
    return names | {path.relative_to(ROOT).as_posix() for path in package}


def test_distributions_hold_both_sides_and_the_demo_model(tmp_path: Path) -> None:
    """Wheel and source archive hold files where the checkout has links."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        in_wheel = {entry.filename for entry in wheel.infolist() if entry.file_size}
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        members = [member for member in archive if member.isfile()]
        in_archive = {member.name.partition("/")[2] for member in members}
    empty = {name for name in shipped() if not (ROOT / name).stat().st_size}
    assert shipped() - empty <= in_wheel
    assert shipped() <= in_archive
    assert not {name for name in in_wheel if name.startswith(SIDES)}
