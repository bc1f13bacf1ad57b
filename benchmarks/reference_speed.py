"""Measure the reference engine on the demo model: tokens a second, beside the floor.

The floor is what reading every active weight once for each token would allow, since the
reference engine computes each token on its own. How far it stays below says what loops
and launches cost; that gap is what the optimized side exists to close.

    python -m benchmarks.reference_speed --device cuda --bandwidth 4.3e12
"""

from __future__ import annotations

import datetime
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.config import MOE
from lockstep.parameters import num_weight_bytes
from lockstep.verify.certificate import find_commit

PROMPT_TOKENS = 96
NEW_TOKENS = 64


def active_weight_bytes(llm: LLM) -> int:
    """Count the bytes of the weights that one token meets."""
    config, parameters = llm.model_config, llm.engine.model.parameters
    total = num_weight_bytes(config, llm.dtype) - _bytes(parameters.embedding)
    for letter, layer in zip(config.layer_pattern, parameters.layers, strict=True):
        if letter == MOE:
            assert config.moe is not None
            idle = 1 - config.moe.top_k / config.moe.num_experts
            total -= int(idle * (_bytes(layer.experts_up) + _bytes(layer.experts_down)))
    return total


def measure(llm: LLM, requests: int) -> dict[str, Any]:
    """Time prefill and decode steps of a number of equal-length requests."""
    vocab = llm.model_config.vocab_size
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0
    )
    for row in range(requests):
        prompt = [3 + (row * 31 + 7 * i) % (vocab - 3) for i in range(PROMPT_TOKENS)]
        llm.engine.add(prompt, sampling)
    tokens, seconds = {"prefill": 0, "decode": 0}, {"prefill": 0.0, "decode": 0.0}
    while llm.engine.has_work:
        start = time.perf_counter()
        record = llm.engine.step()
        kind = "prefill" if record.shape.prefill_requests else "decode"
        seconds[kind] += time.perf_counter() - start
        tokens[kind] += record.shape.tokens
    return {
        "requests": requests,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        **{f"{k}_tokens_per_second": tokens[k] / seconds[k] for k in tokens},
    }


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Say on what, with what and when the figures were taken.

    The commit is that of this checkout, whatever folder is current.
    """
    name = _cpu_name()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "commit": commit or find_commit() or None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    bandwidth: Annotated[
        float | None, typer.Option(help="measured bytes/s of a copy, for the floor")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="the commit, where git cannot say")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure one request and eight, and write what came out."""
    config = EngineConfig(max_requests=8, prefix_caching=False)
    llm = LLM("demo", device=device, config=config, verbose=False)
    measure(llm, 1)
    result: dict[str, Any] = {
        "environment": environment(torch.device(device), commit),
        "active_weight_bytes": active_weight_bytes(llm),
        "runs": [measure(llm, requests) for requests in (1, 8)],
    }
    if bandwidth is not None:
        result["floor_tokens_per_second"] = bandwidth / result["active_weight_bytes"]
        result["bandwidth_bytes_per_second"] = bandwidth
    text = json.dumps(result, indent=2)
    Console().print_json(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")


def _cpu_name() -> str:
    """Name the processor, as well as the system can say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    """Return a package's version, if it is there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    typer.run(main)
