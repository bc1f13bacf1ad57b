"""Counts what Triton's interpreter runs, so that a whole session can be held to it.

A program takes about 9 ms there. Each report of a test, of its set-up and of what comes
after it carries what was run since the last one: so reports of other processes do, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tests.tolerances import MOST_INTERPRETED

PROGRAMS, STEPS = MOST_INTERPRETED

#: Of this process, since the last report.
_COUNTS: Counter[str] = Counter()


def start() -> None:
    """Count all programs from now on, and the steps of engines that run any."""
    from triton.runtime.interpreter import InterpreterBuilder

    from lockstep.lifecycle import Lifecycle

    set_grid, take_step = InterpreterBuilder.set_grid_dim, Lifecycle.step

    def set_and_count(builder: Any, *grid: int) -> None:
        set_grid(builder, *grid)
        _COUNTS[PROGRAMS] += grid[0] * grid[1] * grid[2]

    def step_and_count(engine: Any, *args: Any, **kwargs: Any) -> Any:
        before = _COUNTS[PROGRAMS]
        try:
            return take_step(engine, *args, **kwargs)
        finally:
            _COUNTS[STEPS] += _COUNTS[PROGRAMS] > before

    InterpreterBuilder.set_grid_dim = set_and_count  # type: ignore[method-assign]
    Lifecycle.step = step_and_count  # type: ignore[method-assign]


def note(report: Any) -> None:
    """Let a report carry what was counted since the last one."""
    report.user_properties += _COUNTS.items()
    _COUNTS.clear()


def add_up(reports: Iterable[Any]) -> Counter[str]:
    """Add up what reports carry."""
    totals: Counter[str] = Counter()
    for report in reports:
        carried = dict(getattr(report, "user_properties", ()))
        totals.update({name: carried.get(name, 0) for name in MOST_INTERPRETED})
    return totals


def excesses(totals: Counter[str]) -> Iterator[str]:
    """Say what is more than a session may run."""
    for name, most in MOST_INTERPRETED.items():
        if totals[name] > most:
            yield f"{totals[name]:,} {name}; at most {most:,} are allowed"
