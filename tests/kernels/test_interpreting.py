"""What is interpreted is counted, and too much of it is said."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from lockstep.optimized.kernels import moe
from tests.kernels import interpreting
from tests.kernels.interpreting import PROGRAMS, STEPS
from tests.tolerances import MOST_INTERPRETED


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs kernels itself")
def test_each_program_is_counted() -> None:
    """As many as the grids have, once."""
    interpreting.note(SimpleNamespace(user_properties=[]))
    moe._sort(torch.tensor([[0, 2], [2, 4]]), 5, 16, 4)
    report = SimpleNamespace(user_properties=[("other", 1)])
    interpreting.note(report)
    assert report.user_properties == [("other", 1), (PROGRAMS, 5)]
    interpreting.note(report)
    assert len(report.user_properties) == 2


def test_too_much_is_said() -> None:
    """Of all reports together, also of what comes before and after a test."""
    most = MOST_INTERPRETED[STEPS]
    properties = [(STEPS, most // 2), (PROGRAMS, 7)]
    reports = [SimpleNamespace(user_properties=properties)] * 2 + [SimpleNamespace()]
    totals = interpreting.add_up(reports)
    assert totals == Counter({STEPS: most // 2 * 2, PROGRAMS: 14})
    assert not list(interpreting.excesses(totals))
    totals = interpreting.add_up(reports * 2)
    assert list(interpreting.excesses(totals)) == [
        f"{2 * most} {STEPS}; at most {most} are allowed"
    ]
