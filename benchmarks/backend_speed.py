"""Time both backends, and every way to run steps, on the demo model.

python -m benchmarks.backend_speed --device cuda --output FILE
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.reference_speed import environment, measure
from lockstep import LLM, EngineConfig

WAYS = (
    ("reference", None),
    ("optimized", "off"),
    ("optimized", "padded"),
    ("optimized", "decode"),
    ("optimized", "all"),
)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    commit: Annotated[
        str | None, typer.Option(help="the commit, where git cannot say")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure one request and eight, each after a run that warms up."""
    rows: list[dict[str, Any]] = []
    for backend, graphs in WAYS:
        if graphs in ("decode", "all") and device == "cpu":
            continue
        config = EngineConfig(
            max_requests=8,
            max_tokens_per_step=1024,
            prefix_caching=False,
            graphs=graphs,  # type: ignore[arg-type]
        )
        llm = LLM("demo", backend, device, config=config, verbose=False)
        for requests in (1, 8):
            # Kernels are compiled for some numbers of rows at a first call.
            measure(llm, requests)
            measured = measure(llm, requests)
            rows.append({"backend": backend, "graphs": graphs, **measured})
    text = json.dumps(
        {"environment": environment(torch.device(device), commit), "rows": rows},
        indent=2,
    )
    Console().print_json(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
