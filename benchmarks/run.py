"""Measure the optimized engine on the agreed shapes and workloads, beside the floors.

Weights are drawn on the device. Each workload is warmed up on other tokens, then served
three times, each time with tokens of its own; the whole call is timed from the caller's
side. Workloads with a shared prefix cache it beforehand, with another suffix.

With ``LOCKSTEP_START=cold`` and an empty kernel cache the start-up is noted as cold.

    python -m benchmarks.run --shape nano3 --workload ttft_512
    python -m benchmarks.run --output benchmarks/results/h200_workloads.json
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.reference_speed import environment
from benchmarks.rooflines import floor_seconds
from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, build, tokens
from lockstep import EngineConfig, RandomWeights, SamplingParams
from lockstep.assemble import build_engine, settle_options
from lockstep.families import read_model_config
from lockstep.memory import plan_memory
from lockstep.parameters import make_parameters

console = Console(stderr=True)
WORKLOADS = tuple(workload.name for workload in build(0))
#: Seeds of the tokens that warm up, and of the first repetition.
WARM_UP, FIRST = 77, 10
REPETITIONS = 3
#: Requests at once, tokens a step, and longest request of the measured engine.
LIMITS = {"max_requests": 256, "max_tokens_per_step": 8192, "max_length": 8192}


def build_cold(shape: str, graphs: str) -> tuple[Any, float]:
    """Build an engine with drawn weights; return it and the seconds of its start-up.

    Start-up is what follows once weights are in memory: pools, kernels, graphs.
    """
    device, dtype = torch.device("cuda"), torch.bfloat16
    model = read_model_config(SHAPES[shape])
    config = EngineConfig(graphs=graphs, **LIMITS)  # type: ignore[arg-type]
    config = settle_options(config, "optimized", device)
    sizes = plan_memory(model, config, device, dtype)
    parameters = make_parameters(model, dtype, device, RandomWeights(seed=0).fill)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine = build_engine(model, config, sizes, parameters, device, "optimized")
    torch.cuda.synchronize()
    return engine, time.perf_counter() - begin


def serve(
    engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Counter[str]:
    """Serve prompts to the end; count steps by what ran them, and the reads."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0
    )
    for prompt in prompts:
        engine.add(prompt, sampling)
    counts: Counter[str] = Counter()
    while engine.has_work:
        record = engine.step()
        kind = "prefill" if record.shape.prefill_requests else "decode"
        counts[f"{kind} {record.mode}"] += 1
        counts["host reads"] += record.host_reads
        counts["tokens"] += len(record.tokens)
        counts["failed"] += len(record.failed)
    return counts


def repeat(engine: Any, name: str, seed: int) -> tuple[float, Counter[str]]:
    """Serve a workload with the tokens of a seed; return seconds and counts."""
    workload = find(name, seed)
    engine.reset()
    if workload.warm:
        shared = workload.prompts[0][:4096]
        serve(engine, [shared + tokens(seed + 5, 128)], 1)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    counts = serve(engine, workload.prompts, workload.max_tokens)
    seconds = time.perf_counter() - begin
    expected = len(workload.prompts) * workload.max_tokens
    if counts["tokens"] != expected or counts["failed"]:
        raise SystemExit(f"{name}: {counts['tokens']} tokens, not {expected}: {counts}")
    return seconds, counts


def find(name: str, seed: int) -> Workload:
    """Find a workload by name."""
    return next(each for each in build(seed) if each.name == name)


def measure(engine: Any, shape: str, name: str) -> dict[str, Any]:
    """Measure one workload."""
    repeat(engine, name, WARM_UP)
    runs = [repeat(engine, name, FIRST + each) for each in range(REPETITIONS)]
    seconds = [run[0] for run in runs]
    floor = floor_seconds(shape, find(name, FIRST))
    return {
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "floor_s": floor,
        "share_of_floor": floor / statistics.median(seconds),
        "steps": dict(sorted(runs[0][1].items())),
    }


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print what was measured."""
    table = Table("shape", "workload", "seconds", "floor", "share", "steps")
    for shape, cells in rows.items():
        for name, cell in cells.items():
            share = f"{cell['share_of_floor']:.0%}"
            steps = ", ".join(f"{k} {v}" for k, v in cell["steps"].items())
            times = f"{cell['median_s']:.4f}", f"{cell['floor_s']:.4f}"
            table.add_row(shape, name, *times, share, steps)
    console.print(table)


def main(
    shape: Annotated[list[str] | None, typer.Option(help="nano3 or dense4b")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help=", ".join(WORKLOADS))
    ] = None,
    graphs: Annotated[str, typer.Option(help="off, padded, decode or all")] = "all",
    commit: Annotated[
        str | None, typer.Option(help="the commit, where git cannot say")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file; cells in it stay unless run")
    ] = None,
) -> None:
    """Measure cells, one shape after the other, and write them to one file."""
    if unknown := {*(shape or ()), *(workload or ())} - {*SHAPES, *WORKLOADS}:
        known = ", ".join((*SHAPES, *WORKLOADS))
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is none of {known}")
    if not torch.cuda.is_available():
        raise typer.BadParameter("these shapes need a GPU, and torch finds none")
    found: dict[str, Any] = {"rows": {}, "startup_s": {}}
    if output is not None and output.exists():
        found = json.loads(output.read_text(encoding="utf-8"))
    device = torch.device("cuda")
    found["environment"] = environment(device, commit) | {"graphs": graphs}
    for each in shape or SHAPES:
        engine, seconds = build_cold(each, graphs)
        kind = os.environ.get("LOCKSTEP_START", "warm")
        found["startup_s"].setdefault(each, {})[kind] = seconds
        console.print(f"{each}: started in {seconds:.1f} s ({kind})")
        for name in workload or WORKLOADS:
            # Other cells of the file may be of other commits.
            row = measure(engine, each, name) | {
                key: found["environment"][key] for key in ("commit", "date")
            }
            found["rows"].setdefault(each, {})[name] = row
            if output is not None:
                output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        del engine
        torch.cuda.empty_cache()
    show(found["rows"])
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
