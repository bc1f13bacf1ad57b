"""The mutants of the bookkeeping: what is changed, and how a change takes effect."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from scripts import mutation
from scripts.mutation import MODULES, ROOT, Mutant, Verdict

TOY = '''
"""A docstring, which is left alone."""
from __future__ import annotations

LIMIT: int = 4


def clip(values: list[int], most: int = 9) -> list[int]:
    """Another."""
    assert most > 0, "an invariant is left alone"
    if not values:
        return []
    found = [v for v in values if v < LIMIT and v != most]
    found.sort()
    raise ValueError(f"a message is left alone, {most + 1}")
'''
#: Line, and what becomes of it.
CHANGES = {
    ("LIMIT: int = 4", "4 -> 5"),
    ("def clip(values: list[int], most: int = 9) -> list[int]:", "9 -> 10"),
    ("if not values:", "not values -> not not values"),
    ("return []", "return []: returns None"),
    ("found = [v for v in values if v < LIMIT and v != most]", "deleted"),
    (
        "found = [v for v in values if v < LIMIT and v != most]",
        "for v in values if v < LIMIT and v != most: negated",
    ),
    (
        "found = [v for v in values if v < LIMIT and v != most]",
        "v < LIMIT and v != most -> v < LIMIT or v != most",
    ),
    (
        "found = [v for v in values if v < LIMIT and v != most]",
        "v < LIMIT -> v <= LIMIT",
    ),
    (
        "found = [v for v in values if v < LIMIT and v != most]",
        "v != most -> v == most",
    ),
    ("found.sort()", "deleted"),
    ('raise ValueError(f"a message is left alone, {most + 1}")', "deleted"),
}


def test_each_small_change_is_made() -> None:
    """Once; and docstrings, types, messages and assertions are left alone."""
    found = mutation.mutants_of("toy.py", TOY)
    assert {(mutant.line, mutant.change) for mutant in found} == CHANGES
    assert len({mutant.key for mutant in found}) == len(found) == len(CHANGES)


def test_equal_changes_of_equal_lines_are_told_apart() -> None:
    """By their order within a function."""
    found = mutation.mutants_of("toy.py", "def f():\n    a()\n    a()\n")
    assert [mutant.change for mutant in found] == ["deleted", "deleted (2)"]


@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_a_mutant_is_one_change(index: int) -> None:
    """Compiled, each differs from the original."""
    mutant = mutation.compile_mutant(TOY, index, "toy.py")
    assert mutant != compile(TOY, "toy.py", "exec")


def test_whoever_imported_gets_what_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A changed function replaces the real one in all modules that have it."""
    toy, user = ModuleType("lockstep.toy"), ModuleType("tests.user")
    exec("def f():\n    return 1\n", toy.__dict__)
    user.__dict__["g"] = toy.f
    for module in (toy, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    code = mutation.compile_mutant("def f():\n    return 1\n", 1, "toy.py")
    mutation.install(toy, code)
    assert user.g is toy.f
    assert user.g() == 2


def test_survivors_are_mutants_of_these_files() -> None:
    """No entry outlives its line, and each has a reason."""
    known = {
        mutant.key
        for file in MODULES
        for mutant in mutation.mutants_of(file, (ROOT / file).read_text("utf-8"))
    }
    survivors = mutation.load_survivors()
    assert [mutation.show(key) for key in survivors if key not in known] == []
    assert all(reason.strip() for reason in survivors.values())


def test_survivors_must_be_those_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many or one too few is a problem; other files do not count."""
    mutants = [Mutant("a.py", "f", f"line {n}", "deleted", n, n) for n in range(3)]
    listed = {mutants[0].key: "why", mutants[1].key: "why", ("b.py", "", "", ""): "why"}
    monkeypatch.setattr(mutation, "load_survivors", lambda: listed)
    verdicts = [Verdict(mutants[0], "", 0.0), Verdict(mutants[1], "a test", 0.0)]
    found = mutation.problems([*verdicts, Verdict(mutants[2], "", 0.0)], ["a.py"])
    assert len(found) == 2
    assert "without a reason" in found[0] and "line 2" in found[0]
    assert "was killed" in found[1] and "line 1" in found[1]
    assert mutation.problems(verdicts[:1], ["c.py"]) != []


def test_shares_are_counted() -> None:
    """File by file; a later run replaces what it tried."""
    file, other = list(MODULES)[:2]
    mutants = [Mutant(file, "f", f"line {n}", "deleted", n, n) for n in range(4)]
    killers = ["a test", "never ends", "", ""]
    verdicts = [Verdict(m, k, 0.0) for m, k in zip(mutants, killers, strict=True)]
    known = {"files": {other: {"mutants": 6, "killed": 6, "survivors": []}}}
    first = mutation.merged(known, verdicts, is_again=False)
    assert (first["mutants"], first["killed"], first["share_killed"]) == (10, 8, 0.8)
    better = [Verdict(mutants[2], "a test", 0.0), Verdict(mutants[3], "", 0.0)]
    second = mutation.merged(first, better, is_again=True)
    assert (second["mutants"], second["killed"]) == (10, 9)
    assert second["files"][file]["survivors"] == [mutation.show(mutants[3].key)]
