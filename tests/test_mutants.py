"""The list of mutants fits the tree, and the runner judges fairly."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import Mutant, Outcome

ROOT = Path(__file__).resolve().parents[1]

TOY = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "toy/__init__.py": "",
    "toy/real/__init__.py": "def double(x):\n    return x + x\n",
    "tests/test_toy.py": """\
import time
import pytest

@pytest.fixture
def prepared():
    from toy.real import double
    assert double(0) == 0

@pytest.mark.parametrize("x", [0, 3])
def test_double(x):
    from toy.real import double
    time.sleep(1.5 * double(0))
    assert double(x) == 2 * x

def test_prepared(prepared):
    pass

def test_zero():
    from toy.real import double
    assert double(0) == 0

def test_alone():
    for name in ("lockstep", "scripts", "tests.factories"):
        with pytest.raises(ImportError):
            __import__(name)
""",
}

KILLED = Mutant(
    id="T1",
    name="a factor of three",
    file="toy/real/__init__.py",
    old="x + x",
    new="x + x + x",
    tests=("tests/test_toy.py::test_double",),
    source="made up",
)

ONE_SURVIVES = (*KILLED.tests, "tests/test_toy.py::test_zero")
ALONE = ("tests/test_toy.py::test_alone",)
UNPREPARED = ("tests/test_toy.py::test_prepared",)

#: Faults of the toy tree and what must become of them.
CASES = {
    "killed": (KILLED, Outcome.KILLED),
    "no difference": (replace(KILLED, new="2 * x"), Outcome.SURVIVED),
    "nothing else is seen": (replace(KILLED, tests=ALONE), Outcome.SURVIVED),
    "not for a GPU": (replace(KILLED, needs_gpu=True), Outcome.BROKEN),
    "one test passes": (replace(KILLED, tests=ONE_SURVIVES), Outcome.SURVIVED),
    "cannot be imported": (
        replace(KILLED, old="def ", new="import no\ndef "),
        "broken",
    ),
    "no such name": (replace(KILLED, new="y + y"), Outcome.BROKEN),
    "no room": (replace(KILLED, new="[0] * 2**60"), Outcome.BROKEN),
    "fails in a fixture": (
        replace(KILLED, new="x + x + 1", tests=UNPREPARED),
        Outcome.BROKEN,
    ),
    "no such test": (
        replace(KILLED, tests=("tests/test_toy.py::test_none",)),
        Outcome.BROKEN,
    ),
    "never ends": (replace(KILLED, new="x + x + 100"), Outcome.TIMEOUT),
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Make a small repository with a linked folder and a file that git ignores."""
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "link").symlink_to("toy/real")
    (tmp_path / ".gitignore").write_text("ignored\n", encoding="utf-8")
    (tmp_path / "ignored").write_text("", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_each_mutant_fits_the_tree() -> None:
    """Old texts stand exactly once, faults are programs, and named tests exist."""
    assert list(mutants.problems(ROOT, mutants.load(ROOT))) == []


def test_each_test_that_needs_a_gpu_is_there() -> None:
    """By its whole id: here none of them runs, and one that is not found kills all."""
    needing = [each for each in mutants.load(ROOT) if each.needs_gpu]
    named = {test for each in needing for test in each.tests}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q"]
    done = subprocess.run([*command, *sorted(named)], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_copy_keeps_links_and_leaves_ignored_files(toy: Path, tmp_path: Path) -> None:
    """The copy is what a clone would be, with changes not yet committed."""
    target = tmp_path / "ignored-too"
    (tmp_path / ".gitignore").write_text("ignored*\n", encoding="utf-8")
    mutants.copy_tree(toy, target)
    assert (target / "link").is_symlink()
    assert (target / "link" / "__init__.py").is_file()
    assert not (target / "ignored").exists()


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str, toy: Path) -> None:
    """Only a test that fails in its own body kills."""
    mutant, outcome = CASES[case]
    timeout = 2 if outcome == Outcome.TIMEOUT else 60
    assert mutants.try_mutant(toy, mutant, timeout).outcome == outcome
    assert "x + x\n" in (toy / KILLED.file).read_text(encoding="utf-8")


def test_run_fails_when_one_survives(toy: Path, capsys: pytest.CaptureFixture) -> None:
    """The exit status tells survivors, and the table names them."""
    survivor = replace(KILLED, id="T2", new="2 * x")
    assert mutants.run(toy, [KILLED], 2) == 0
    assert "1 of 1 mutants killed" in capsys.readouterr().out
    assert mutants.run(toy, [KILLED, survivor], 2) == 1
    assert "T2 survived" in capsys.readouterr().out


def test_run_needs_tests_that_pass(toy: Path, capsys: pytest.CaptureFixture) -> None:
    """A test that fails anyway proves nothing."""
    path = toy / KILLED.file
    path.write_text("def double(x):\n    return x + x - 1\n", encoding="utf-8")
    assert mutants.run(toy, [KILLED], 1) == 1
    assert "without a fault" in capsys.readouterr().out


def test_what_a_gpu_shows_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is counted, and run where it is asked for."""
    tried: list[Mutant] = []
    gpu = replace(KILLED, id="T2", needs_gpu=True)
    monkeypatch.setattr(mutants, "load", lambda _: [KILLED, gpu])
    monkeypatch.setattr(mutants, "preload", lambda: None)
    monkeypatch.setattr(mutants, "run", lambda _, many, __: tried.extend(many) or 0)
    for arguments in ([], ["--gpu"]):
        monkeypatch.setattr("sys.argv", ["mutants.py", *arguments])
        assert mutants.main() == 0
    assert tried == [KILLED, gpu]
    assert capsys.readouterr().out == "1 more need a GPU, and --gpu\n"


def test_problems_are_named(toy: Path) -> None:
    """An entry that has rotted, or names nothing, is a problem."""
    rotten = {
        "stands 0 times": replace(KILLED, old="x * x"),
        "stands 2 times": replace(KILLED, old="x "),
        "listed twice": KILLED,
        "tests/gpu": replace(KILLED, needs_gpu=True),
        "are equal": replace(KILLED, new=KILLED.old),
        "must not be empty": replace(KILLED, source=""),
        "invalid syntax": replace(KILLED, new="x +"),
        "No such file": replace(KILLED, file="toy/none.py"),
        "no test": replace(KILLED, tests=("tests/test_toy.py::test_none",)),
    }
    (toy / KILLED.file).write_text("def double(x):\n    return x + x\n# x \n")
    for text, mutant in rotten.items():
        pair = [mutant, mutant] if mutant is KILLED else [mutant]
        assert any(text in found for found in mutants.problems(toy, pair)), text
    assert list(mutants.problems(toy, [KILLED])) == []
