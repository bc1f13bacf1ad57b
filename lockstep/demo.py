"""The demonstration: the packaged model plays a scene on both backends."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from rich.padding import Padding
from rich.table import Table

from lockstep.assemble import BACKENDS
from lockstep.chat import Chat
from lockstep.cli import KINDS, console, reuse_of
from lockstep.llm import LLM, find_device
from lockstep.parameters import num_parameters
from lockstep.request import RequestOutput, SamplingParams

#: The demonstration's scene, and who speaks.
SPEAKER, CHARACTER = "HORATIO", "HAMLET"
LINES = (
    "My lord, I have not seen you so merry. What is the matter?",
    "And what says the king to it?",
)
#: Replies that are timed together.
REPLIES = 8


def show_demo(device: str, backend: str, max_tokens: int, seed: int) -> None:
    """Let the packaged model answer two prompts, of which the second reuses the first.

    Args:
        device: Name of a device, or ``auto``.
        backend: A backend, or ``both``.
        max_tokens: Longest reply, in tokens.
        seed: Key of the random draws.
    """
    sampling = SamplingParams(temperature=0.5, max_tokens=max_tokens, seed=seed)
    texts: list[list[str]] = []
    speeds: list[str] = []
    steps: Counter[str] = Counter()
    for side in BACKENDS if backend == "both" else (backend,):
        llm = load_demo(side, device)
        steps = count_steps(llm)
        if not texts:
            show_model(llm)
        texts.append(play(llm, sampling, is_shown=not texts))
        with console.status(f"{REPLIES} replies at once on the {side} backend"):
            speeds.append(f"{side} {measure_replies(llm, sampling):,.0f} tokens/s")
    if backend == "both":
        same = "the same text" if texts[0] == texts[1] else "another text"
        console.print(f"The optimized backend gave [bold green]{same}[/].")
    console.print(f"{REPLIES} replies at once: {', '.join(speeds)}")
    if any("graph" in step for step in steps):
        counted = ", ".join(f"{count} {step}" for step, count in sorted(steps.items()))
        console.print(f"Its steps: {counted}")
    console.print()
    console.print(f"Next: [bold]lockstep demo --seed {seed + 1} --max-tokens 100[/]")


def load_demo(backend: str, device: str) -> LLM:
    """Load the packaged model; on a GPU the optimized side runs all steps as graphs.

    In float32, in which both sides draw the same tokens: in bfloat16 they round apart,
    and a drawn text soon goes its own way. So few tokens a step that several replies
    begin in more than one.
    """
    options: dict[str, Any] = {
        "max_requests": REPLIES,
        "max_tokens_per_step": 64,
        "dtype": "float32",
    }
    if backend == "optimized" and find_device(device).type == "cuda":
        options["graphs"] = "all"
    with console.status(f"loading the demo model for the {backend} backend"):
        return LLM("demo", backend=backend, device=device, verbose=False, **options)


def count_steps(llm: LLM) -> Counter[str]:
    """Count the steps of an engine from now on, by what they do and what ran them."""
    counts: Counter[str] = Counter()
    step = llm.engine.step

    def counted(*arguments: Any) -> Any:
        record = step(*arguments)
        kinds = (
            ("decode", record.shape.decode_requests),
            (
                "prefill",
                record.shape.prefill_requests,
            ),
        )
        kind = " and ".join(name for name, count in kinds if count)
        counts[f"{kind} by {'a graph' if record.mode == 'graph' else record.mode}"] += 1
        return record

    llm.engine.step = counted
    return counts


def play(llm: LLM, sampling: SamplingParams, is_shown: bool) -> list[str]:
    """Play the demonstration's scene; return the replies."""
    scene = Chat(llm, sampling_params=sampling)
    replies: list[str] = []
    for turn, line in enumerate(LINES, start=1):
        output = scene.send({"role": "user", "name": SPEAKER, "content": line})
        if is_shown:
            show_turn(turn, line, output)
        replies.append(output.text)
    return replies


def measure_replies(llm: LLM, sampling: SamplingParams) -> float:
    """Return the tokens per second of several replies to the scene's first line.

    The same run before the one that is timed compiles what is not yet, and fills the
    cache.
    """
    message = {"role": "user", "name": SPEAKER, "content": LINES[0]}
    draws = [replace(sampling, seed=seed, max_tokens=16) for seed in range(REPLIES)]
    llm.chat([[message]] * REPLIES, draws)
    begin = time.perf_counter()
    outputs = llm.chat([[message]] * REPLIES, draws)
    seconds = time.perf_counter() - begin
    return sum(len(output.token_ids) for output in outputs) / seconds


def show_model(llm: LLM) -> None:
    """Print what the demonstration's model is."""
    config = llm.model_config
    millions = num_parameters(config) / 1e6
    dtype = str(llm.dtype).removeprefix("torch.")
    legend = "   ".join(f"{letter} {kind}" for letter, kind in KINDS.items())
    console.print(
        f"[bold]Lockstep demo[/]: {config.family}, {millions:.1f}M parameters, "
        f"{dtype} on {llm.device}"
    )
    console.print(f"Layers {config.layer_pattern}   [dim]{legend}[/]")
    console.print(f"Cache in blocks of {llm.sizes.block_size} tokens\n")


def show_turn(turn: int, line: str, output: RequestOutput) -> None:
    """Print a prompt, its reply and what the cache did."""
    computed, reused = reuse_of(output).split(", ")
    console.print(f"[bold]Prompt {turn}[/]: {computed}, [bold green]{reused}[/]")
    if turn > 1:
        console.print(f"  Why: {output.cache.reason}", style="green", markup=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(f"[dim]{SPEAKER}[/]", line)
    grid.add_row(f"[bold]{CHARACTER}[/]", " ".join(output.text.split()))
    console.print(Padding(grid, (0, 0, 1, 2), expand=False))
