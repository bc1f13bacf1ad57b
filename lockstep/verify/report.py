"""What a comparison found, and how it is shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from torch import Tensor

from lockstep.plan import RowKind
from lockstep.trace import StepRecord

from .exactness import BUDGETS

#: Kinds of layers by their letter.
LAYERS = {"M": "Mamba-2", "*": "attention", "-": "MLP", "E": "experts"}


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes:
        operation: Key of the component whose result, or whose state, differs first.
        tensor: Result, argument, field or pool.
        details: Values or error, and where in memory.
        layer: Number of the layer; None outside of layers.
        request: Whose; empty where nobody's.
        position: Token position, for a state the tokens before it; None without one.
        step: Number of the step.
        workload: In which.
        blame: The component of the subject whose replacement by the oracle's makes the
            step equal; empty if none does alone.
    """

    operation: str
    tensor: str
    details: str
    layer: int | None = None
    request: str = ""
    position: int | None = None
    step: int = 0
    workload: str = ""
    blame: str = ""

    def __str__(self) -> str:
        """Say where it is in a line."""
        layer = None if self.layer is None else f"layer {self.layer}"
        position = None if self.position is None else f"position {self.position}"
        parts = f"step {self.step}", layer, self.operation, self.tensor
        return ", ".join(each for each in (*parts, self.request, position) if each)


@dataclass
class TruthErrors:
    """Sums of squares: of both sides' errors, and of the true values."""

    oracle: float = 0.0
    subject: float = 0.0
    values: float = 0.0

    def add(self, truth: Tensor, oracle: Tensor, subject: Tensor) -> None:
        """Take in a tensor as each side has it."""
        truth = truth.double()
        self.oracle += float((oracle.double() - truth).square().sum())
        self.subject += float((subject.double() - truth).square().sum())
        self.values += float(truth.square().sum())

    def relative(self) -> tuple[float, float]:
        """Return both sides' relative root-mean-square errors."""
        scale = max(self.values, 1e-300)
        return math.sqrt(self.oracle / scale), math.sqrt(self.subject / scale)


@dataclass
class Verdict:
    """What a comparison found.

    Attributes:
        oracle: The engine that is right.
        subject: The engine compared with it.
        steps: Steps compared.
        difference: The first difference; None if there is none.
        errors: For each kind of floats the largest relative error, in roundoffs.
        ties: Tokens and choices of experts that differ since rounding decides.
        reads: Reads of device memory that the subject waited for.
        events: How often the workload made what happen.
        truth: Errors of both sides' layers against float64, by workload and layer.
        seconds: How long it took.
    """

    oracle: str = ""
    subject: str = ""
    steps: int = 0
    difference: Difference | None = None
    errors: dict[str, float] = field(default_factory=dict[str, float])
    ties: list[str] = field(default_factory=list[str])
    reads: int = 0
    events: Counter[str] = field(default_factory=Counter[str])
    truth: dict[tuple[str, str], TruthErrors] = field(
        default_factory=dict[tuple[str, str], TruthErrors]
    )
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    def note(self, kind: str, error: float) -> None:
        """Note an error, in roundoffs."""
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)

    def __str__(self) -> str:
        """Say what was found in a few lines."""
        if self.difference is None:
            return f"{self.subject} equals {self.oracle} in {self.steps} steps"
        blame = self.difference.blame or "no component alone"
        return (
            f"{self.subject} differs from {self.oracle} at {self.difference}\n"
            f"{self.difference.details} (workload: {self.difference.workload})\n"
            f"to blame: {blame}"
        )


def show(verdict: Verdict, console: Console) -> None:
    """Print a verdict on one screen."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("oracle", verdict.oracle)
    grid.add_row("subject", verdict.subject)
    grid.add_row("steps", f"{verdict.steps} in {verdict.seconds:.1f} s")
    happened = (f"{count} {name}" for name, count in verdict.events.most_common())
    grid.add_row("events", ", ".join(happened))
    for kind, error in verdict.errors.items():
        grid.add_row(kind, f"{error:.3g} roundoffs apart, at most {BUDGETS[kind]:g}")
    grid.add_row("ties", str(len(verdict.ties)))
    grid.add_row("reads", f"{verdict.reads} by the subject")
    console.print(grid, markup=False)
    if verdict.truth:
        console.print(_truth_table(verdict))
    style = "bold green" if verdict.equal else "bold red"
    console.print(str(verdict), style=style, markup=False)


def _truth_table(verdict: Verdict) -> Table:
    """Lay out both sides' errors against float64."""
    table = Table(title="Relative error against float64", box=None, padding=(0, 2))
    for column in ("workload", "layer", "oracle", "subject"):
        table.add_column(column)
    for (workload, layer), errors in verdict.truth.items():
        table.add_row(workload, layer, *(f"{each:.2e}" for each in errors.relative()))
    return table


def events_of(record: StepRecord) -> Iterator[str]:
    """Name what happened in a step."""
    kinds = {row.kind for row in record.rows}
    if kinds:
        yield "mixed steps" if len(kinds) == 2 else f"{next(iter(kinds))} steps"
    for row in record.rows:
        if row.kind is RowKind.PREFILL and not row.samples:
            yield "cuts of a prompt"
        if row.cache is not None and row.cache.num_skipped_tokens:
            yield "restores"
        yield from (f"{row.kind} snapshots" for _ in row.snapshots)
    for name in ("preempted", "deferred", "evicted_blocks", "evicted_states"):
        yield from [name.replace("_", " ")] * len(getattr(record.plan, name))
    for name in ("aborted", "failed", "interrupted", "finished"):
        yield from [name] * len(getattr(record, name))
