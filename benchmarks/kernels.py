"""Time each kernel alone at published shapes, beside what a copy reaches.

``python -m benchmarks.kernels OUT.json [NAME ...]`` writes a row for each case whose
name contains one of the names. A case is captured in a CUDA graph, over inputs that
rotate through more memory than the L2 cache holds, where the case has that much.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.reference_speed import environment

#: Modules with a function ``cases`` that returns an iterable of `Case`.
MODULES = ("benchmarks.kernels_mamba", "benchmarks.kernels_attention_moe")
#: Bytes of inputs over which calls rotate; the L2 cache of an H200 has 60 MB.
ROTATED = 256 * 1024**2
#: Seconds of work in a graph, as guessed from its bytes, and replays of each.
GRAPH_SECONDS = 4e-3
REPLAYS = 9


class Case(NamedTuple):
    """A kernel at one shape.

    Attributes:
        name: How results call it.
        make: Draws inputs, and returns the call on them.
        num_bytes: Bytes that must be read and written, each once.
        operations: Floating-point operations that must be done.
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    num_bytes: int
    operations: int = 0


def time_calls(calls: list[Callable[[], Any]], num_bytes: int) -> float:
    """Return the median seconds of a call, out of graphs that hold many."""
    guess = len(calls) * (num_bytes / 3e12 + 3e-6)
    rounds = max(1, min(200 // len(calls), int(GRAPH_SECONDS / guess)))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return median(_seconds(graph.replay) for _ in range(REPLAYS)) / (
        rounds * len(calls)
    )


def _seconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bandwidth() -> float:
    """Measure a large copy, in bytes read and written per second."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    num_bytes = 2 * source.nbytes

    def copy() -> Tensor:
        # `copy_` would hand it to the copy engine, which is slower.
        return torch.mul(source, 1, out=target)

    return num_bytes / time_calls([copy], num_bytes)


def measure(case: Case, bandwidth: float) -> dict[str, float]:
    """Time a case, and put its time beside the bytes and operations it needs."""
    copies = max(1, min(32, ROTATED // max(1, case.num_bytes)))
    seconds = time_calls([case.make() for _ in range(copies)], case.num_bytes)
    row = {
        "us": seconds * 1e6,
        "MB": case.num_bytes / 1e6,
        "TBps": case.num_bytes / seconds / 1e12,
        "share_of_copy": case.num_bytes / seconds / bandwidth,
    }
    if case.operations:
        row["TFLOPs"] = case.operations / seconds / 1e12
    return row


def main(
    path: Annotated[Path, typer.Argument(help="JSON file to write")],
    names: Annotated[
        list[str] | None, typer.Argument(help="parts of names; all cases unless given")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="the commit, where git cannot say")
    ] = None,
) -> None:
    """Measure all cases, or those that are named."""
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    rows: dict[str, dict[str, float]] = {}
    for module in MODULES:
        for case in importlib.import_module(module).cases():
            if any(name in case.name for name in names or [""]):
                rows[case.name] = row = measure(case, bandwidth)
                numbers = "  ".join(f"{k} {v:.4g}" for k, v in row.items())
                print(f"{case.name:28} {numbers}", flush=True)
                torch.cuda.empty_cache()
    found = environment(torch.device("cuda"), commit)
    result = {"environment": found, "copy_TBps": bandwidth / 1e12, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
