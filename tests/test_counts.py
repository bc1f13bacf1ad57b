"""The line counts themselves, on small texts."""

from __future__ import annotations

from pathlib import Path

from scripts.counts import (
    Counts,
    Group,
    broken_limits,
    count_group,
    count_text,
    is_anything,
    unneeded_exceptions,
)

TEXT = '''"""One line."""

import math
from os import (
    path,
)

# A comment.
LIMIT = 4  # no line of its own


@decorated
def outer(
    count: int,
) -> int:
    """Two lines of docstring.

    The blank between them does not count.
    """

    def inner() -> str:
        return """text
that is code
"""

    # Another comment.
    return len(inner()) + count
'''


def test_each_line_counts_once() -> None:
    """Code, docstrings and comments are kept apart; blank lines count nowhere."""
    counts = count_text(TEXT, "toy.py")
    assert (counts.code, counts.docstrings, counts.comments) == (10, 4, 2)
    assert counts.imports == 4
    assert counts.functions == {"toy.py:outer@13": 8, "toy.py:inner@21": 4}


def test_group_leaves_linked_folders_out(tmp_path: Path) -> None:
    """A side that is linked into the package is counted at its own place."""
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "a.py").write_text(TEXT, encoding="utf-8")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "b.py").write_text("X = 1\n", encoding="utf-8")
    (tmp_path / "package" / "side").symlink_to("../side")
    assert count_group(tmp_path, Group("all", "package", is_anything)).code == 1
    assert count_group(tmp_path, Group("all", "side", is_anything)).code == 10


def test_broken_limits_are_named() -> None:
    """Each limit is checked, and an exception is used only where one is needed."""
    group = Group("toy", "toy", is_anything, 100, 10, 50, 40)
    good = Counts(1, 100, 0, 40, 0, {"a.py:short@1": 10})
    bad = Counts(1, 101, 0, 40, 0, {"a.py:long@1": 51})
    assert list(broken_limits(group, good)) == []
    assert len(list(broken_limits(group, bad))) == 4
    assert len(list(broken_limits(group, bad, {"a.py:long": "a table"}))) == 3
    assert list(unneeded_exceptions([(group, bad)], {"a.py:long": "a table"})) == []
    assert (
        len(list(unneeded_exceptions([(group, good)], {"a.py:long": "a table"}))) == 1
    )
