"""Serves prompts of one length at once: how long it takes, and what a step asks for."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.counting import counting
from benchmarks.rooflines import Counts, Rates, floor_of
from benchmarks.workloads import Workload, tokens
from lockstep.request import SamplingParams
from lockstep.trace import StepRecord

#: Most runs of a whole workload, less one that warms up.
RUNS = 3
#: Tokens of the shortest prompt that is timed.
SHORTEST = 4


@dataclass(frozen=True)
class Load:
    """What is served: prompts of one length, all at once.

    Attributes:
        prompts: How many.
        prompt_tokens: Tokens of each.
        new_tokens: Tokens made of each, of which the first comes with the prompt.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int

    def cut(self, factor: int) -> Load:
        """Divide both lengths; at least two steps decode, if there are as many."""
        new = max(self.new_tokens // factor, min(3, self.new_tokens))
        return Load(self.prompts, max(1, self.prompt_tokens // factor), new)

    def draw(self, seed: int, vocab: int) -> Workload:
        """Draw the prompts."""
        rows = range(1000 * seed, 1000 * seed + self.prompts)
        drawn = [tokens(row, self.prompt_tokens, vocab) for row in rows]
        return Workload("equal prompts", drawn, self.new_tokens)


def choose_load(device: torch.device, counts: Sequence[int | None]) -> tuple[str, Load]:
    """Choose a model and a workload: a GPU gets a larger model and more tokens.

    Args:
        device: Where it is served.
        counts: The fields of `Load`, as far as they are settled.
    """
    is_cuda = device.type == "cuda"
    own = (8, 512, 64) if is_cuda else (8, 32, 16)
    chosen = (mine or each for mine, each in zip(counts, own, strict=True))
    return "granite-350m" if is_cuda else "demo", Load(*chosen)


@dataclass
class Served:
    """How long a workload took, and what ran its steps, by kind of step."""

    load: Load
    steps: Counter[str] = field(default_factory=Counter[str])
    tokens: Counter[str] = field(default_factory=Counter[str])
    modes: Counter[str] = field(default_factory=Counter[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())


def greedy(max_tokens: int) -> SamplingParams:
    """Return greedy sampling to the end of a length."""
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0
    )


def kind_of(record: StepRecord) -> str:
    """Name what a step does; all prompts of a workload fit in one."""
    return "prefill" if record.shape.prefill_requests else "decode"


def add(engine: Any, load: Load, seed: int) -> None:
    """Empty the cache and put all prompts into the queue."""
    engine.reset()
    for prompt in load.draw(seed, engine.model_config.vocab_size).prompts:
        engine.add(prompt, greedy(load.new_tokens))


def choose_clock(device: torch.device) -> tuple[str, Callable[[], float]]:
    """Return a clock and its name.

    What one thread computes on a CPU is told best by the time that the processor gave
    it, whatever else it ran; all else by the clock on the wall.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return "process time", time.process_time
    return "wall time", time.perf_counter


def serve(engine: Any, load: Load, seed: int = 0) -> Served:
    """Serve a workload from an empty cache, and time every step.

    A step reads the tokens it draws, and so ends when the device is done.

    Raises:
        RuntimeError: A request failed.
    """
    add(engine, load, seed)
    served = Served(load)
    _, clock = choose_clock(engine.model.device)
    while engine.has_work:
        begin = clock()
        record = engine.step()
        seconds = clock() - begin
        if record.failed:
            raise RuntimeError(f"a request failed: {record.failed}")
        kind = kind_of(record)
        served.seconds[kind] = served.seconds.get(kind, 0.0) + seconds
        served.steps[kind] += 1
        served.tokens[kind] += record.shape.tokens
        served.modes[f"{kind} {record.mode}"] += 1
    return served


def serve_within(
    engine: Any, load: Load, limit: float, least: Load | None = None
) -> Served:
    """Serve as much of a workload as takes less than a number of seconds.

    The shortest part is doubled until twice as much might take too long. The whole is
    served several times after that, and the fastest counts: others were disturbed.

    Args:
        engine: What serves.
        load: The whole workload.
        limit: Most seconds of a run.
        least: A part that is served even if it takes longer.
    """
    shortest, factor = least.prompt_tokens if least else SHORTEST, 1
    while load.prompt_tokens // (2 * factor) >= shortest:
        factor *= 2
    runs = [_serve_settled(engine, load.cut(factor), limit)]
    while factor > 1 and 2 * runs[-1].total < limit:
        factor //= 2
        runs = [_serve_settled(engine, load.cut(factor), limit)]
    while factor == 1 and len(runs) <= RUNS:
        if sum(run.total for run in runs) > limit:
            break
        runs.append(serve(engine, load, len(runs)))
    return min(runs[1:] or runs, key=lambda run: run.total)


def _serve_settled(engine: Any, load: Load, limit: float) -> Served:
    """Serve a part; again if it took long, since kernels may have been compiled."""
    run = serve(engine, load)
    if 2 * run.total < limit:
        return run
    return min(run, serve(engine, load, seed=1), key=lambda run: run.total)


def free(device: torch.device) -> None:
    """Give back the memory of engines that are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def count_steps(engine: Any, load: Load, device: torch.device) -> dict[str, Any]:
    """Count what one step of each kind asks for, on a workload's prompts."""
    add(engine, replace(load, new_tokens=2), seed=RUNS + 1)
    found: dict[str, Any] = {}
    while engine.has_work:
        with counting(device) as counts:
            record = engine.step()
        counted = asdict(counts)
        del counted["reads"]
        size = {
            "tokens": record.shape.tokens,
            "stored_states": len(record.stored_states),
        }
        found[kind_of(record)] = {**size, **counted}
    return found


def rate(
    served: Served, load: Load, counts: Counts, vocab: int, rates: Rates
) -> dict[str, Any]:
    """Turn times into rates, beside the floor.

    Args:
        served: What was measured.
        load: The whole workload, of which it may be a part.
        counts: What the model is made of.
        vocab: Tokens that it knows.
        rates: The machine's.
    """
    kinds = served.seconds.items()
    per_token = {kind: seconds / served.tokens[kind] for kind, seconds in kinds}
    whole = {"prefill": load.prompt_tokens, "decode": load.new_tokens - 1}
    spent = sum(count * per_token.get(kind, 0.0) for kind, count in whole.items())
    decodes = served.steps["decode"]
    return {
        "measured": asdict(served.load),
        "is_cut": served.load != load,
        "tokens_per_second": sum(whole.values()) / spent,
        **{f"{kind}_tokens_per_second": 1 / each for kind, each in per_token.items()},
        "decode_steps_per_second": decodes and decodes / served.seconds["decode"],
        "share_of_floor": floor_of(counts, served.load.draw(0, vocab), rates)
        / served.total,
        "steps": dict(served.modes),
    }
