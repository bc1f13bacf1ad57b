"""What a comparison found, and how it is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from lockstep.trace import StepRecord

#: Kinds of layers by their letter.
LAYERS = {"M": "Mamba-2", "*": "attention", "-": "MLP", "E": "experts"}


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes:
        operation: Key of the component whose result, or whose state, differs first.
        tensor: Result, field or pool.
        details: Values or error, and where in memory.
        layer: Number of the layer; None outside of layers.
        request: Whose row; empty where nobody's.
        position: Token position, for a state the tokens before it; None without one.
        step: Number of the step.
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
    blame: str = ""

    def __str__(self) -> str:
        """Say where it is in a line."""
        layer = None if self.layer is None else f"layer {self.layer}"
        position = None if self.position is None else f"position {self.position}"
        parts = f"step {self.step}", layer, self.operation, self.tensor
        return ", ".join(each for each in (*parts, self.request, position) if each)


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
        events: How often the workload made what happen.
        truth: For each layer the largest relative errors of a step against float64, of
            oracle and subject.
    """

    oracle: str = ""
    subject: str = ""
    steps: int = 0
    difference: Difference | None = None
    errors: dict[str, float] = field(default_factory=dict[str, float])
    ties: list[str] = field(default_factory=list[str])
    events: Counter[str] = field(default_factory=Counter[str])
    truth: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    def __str__(self) -> str:
        """Say what was found in a few lines."""
        if self.difference is None:
            return f"{self.subject} equals {self.oracle} in {self.steps} steps"
        return (
            f"{self.subject} differs from {self.oracle} at {self.difference}\n"
            f"{self.difference.details}\n"
            f"to blame: {self.difference.blame or 'no component alone'}"
        )


def show(verdict: Verdict, console: Console) -> None:
    """Print a verdict on one screen."""
    grid = Table.grid(padding=(0, 2))
    happened = (f"{count} {name}" for name, count in verdict.events.most_common())
    grid.add_row("events", ", ".join(happened))
    for kind, error in verdict.errors.items():
        grid.add_row(kind, f"up to {error:.3g} roundoffs apart")
    grid.add_row("ties", "\n".join([str(len(verdict.ties)), *verdict.ties]))
    for layer, errors in verdict.truth.items():
        both = "{:.1e} (oracle) and {:.1e} (subject)".format(*errors)
        grid.add_row(layer, f"{both} from float64")
    console.print(grid, markup=False)
    style = "bold green" if verdict.equal else "bold red"
    console.print(str(verdict), style=style, markup=False)


def events_of(record: StepRecord | None, other: StepRecord | None) -> Iterator[str]:
    """Name what happened in a step of the oracle; the other may have padded it."""
    assert record is not None
    if kinds := sorted({str(row.kind) for row in record.rows}):
        yield f"{' and '.join(kinds)} steps"
    if other is not None and other.padded_shape != other.shape:
        yield "padded steps"
    for row in record.rows:
        yield from ["restores"] * bool(row.cache and row.cache.num_skipped_tokens)
        yield from ["snapshots"] * len(row.snapshots)
    for name in ("preempted", "deferred", "evicted_blocks", "evicted_states"):
        yield from [name.replace("_", " ")] * len(getattr(record.plan, name))
    for name in ("aborted", "failed", "interrupted", "finished"):
        yield from [name] * len(getattr(record, name))
