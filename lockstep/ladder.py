"""Climbs the ladder: each rung is built, held to the reference, and only then timed.

A rung is equal if it plans as the reference does, draws the same greedy tokens, and
gives log-probabilities within the class of whole engines: in float32, with short scan
chunks, on a few prompts that come one after the other, share a beginning or are cut.
What is not equal is not timed.

Then all prompts are served at once in the model's own dtype. A rung that would take too
long is timed on shorter prompts and fewer new tokens, the same share of both as long as
that leaves two steps that decode; the result says so. Rungs go from slow to fast, so
none is timed on less than the one before, however close to the limit it is. By a clock
on the wall, each is timed once more on the way down, on as much, and the faster time is
kept: what disturbs a machine for a while then spoils no rung alone. Launches, copies
and reads are those of single steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from benchmarks import reports
from benchmarks.reference_speed import environment
from benchmarks.rooflines import choose_rates, count
from benchmarks.serving import (
    Load,
    choose_clock,
    choose_load,
    count_steps,
    free,
    greedy,
    rate,
    serve_within,
)
from benchmarks.shapes import GRANITE_350M
from benchmarks.workloads import tokens
from lockstep import rungs
from lockstep.cli import KINDS, console, notes
from lockstep.config import (
    ATTENTION,
    MAMBA,
    MOE,
    EngineConfig,
    ModelConfig,
    check_at_most,
)
from lockstep.errors import CheckpointError, ConfigError
from lockstep.families import read_config_files, read_model_config
from lockstep.llm import find_device, find_dtype, find_folder
from lockstep.memory import plan_memory
from lockstep.parameters import Parameters, make_parameters, num_parameters
from lockstep.rungs import Rung
from lockstep.trace import StepRecord
from lockstep.verify import Arrival, Setup, Side, Workload, verify
from lockstep.verify.compare import BUDGETS, UNIT_ROUNDOFF, row_errors
from lockstep.weights import WITNESS, Checkpoint

#: Shapes that have no checkpoint here and are filled with random weights.
SHAPES = {"granite-350m": GRANITE_350M}
#: Options of the engines that are compared; blocks are as short as they can be.
SMALL: dict[str, Any] = {
    "max_requests": 3,
    "max_tokens_per_step": 24,
    "max_length": 64,
    "scan_chunk_size": 16,
    "block_size": 16,
    "num_blocks": 12,
    "snapshot_slots": 4,
    "record_logprobs": True,
}
#: Tokens that a compared request makes.
FEW_TOKENS = 4
#: What is counted, with blocks as short: a prompt stores a state within, and the step
#: that decodes ends a block, so that it stores states, too.
COUNTED = Load(prompts=2, prompt_tokens=31, new_tokens=2)
#: Kinds of layers without which a module has nothing to do.
NEEDS = {"attention": ATTENTION, "conv1d": MAMBA, "scan": MAMBA, "moe": MOE}


class Ladder:
    """A model, a workload, and what the reference makes of a few prompts."""

    def __init__(
        self, model: str, device: torch.device, load: Load, seconds: float
    ) -> None:
        """Make the parameters, and run the reference.

        Args:
            model: ``demo``, a checkpoint folder, or a name in `SHAPES`.
            device: Where all rungs run.
            load: The workload.
            seconds: Most that one run of it may take.

        Raises:
            ConfigError: A workload that no engine can have.
            CheckpointError: There is no such model.
        """
        self.model, self.device, self.load, self.seconds = model, device, load, seconds
        self.folder, fields = _read_model(model)
        self.config: ModelConfig = read_model_config(fields)
        self.dtype = find_dtype("auto", self.config, device)
        self.drawn: dict[torch.dtype, Parameters] = {}
        self.timed = self._make_room()
        short = {name: SMALL[name] for name in ("scan_chunk_size", "block_size")}
        self.counted = self._set_up(self.dtype, **_room(COUNTED), **short)
        self.compared = self._set_up(torch.float32, **SMALL)
        self.bound = BUDGETS["log-probabilities"] * UNIT_ROUNDOFF[torch.float32]
        self.expected = self._serve_few(Side())
        self.rates = choose_rates(device, self.dtype)

    def climb(self, rung: Rung, least: Load | None = None) -> dict[str, Any]:
        """Hold a rung to the reference, then time it, on a part at least."""
        side = _side(rung)
        try:
            side.settle(self.compared)
        except ConfigError as error:
            return {"status": "not possible here", "reason": str(error)}
        equality = self.compare(side)
        if reason := equality["difference"]:
            return {"equality": equality, "status": "unequal", "reason": reason}
        found = {"status": "equal", "reason": why_idle(rung, self.config)}
        return {"equality": equality, **found, **self.time(rung, least)}

    def time(
        self, rung: Rung, least: Load | None = None, most: Load | None = None
    ) -> dict[str, Any]:
        """Time a rung, equal or not.

        Args:
            rung: The rung.
            least: The part of the workload that is timed, however long it takes.
            most: The part that is not exceeded; all of it unless given.
        """
        side = _side(rung)
        engine = side.build(self.timed, side.components)
        served = serve_within(engine, most or self.load, self.seconds, least)
        vocab, made_of = self.config.vocab_size, count(self.config, self.dtype.itemsize)
        return rate(served, self.load, made_of, vocab, self.rates)

    def time_again(self, rung: Rung, row: dict[str, Any]) -> dict[str, Any]:
        """Time a rung on as much as before where that may help; return the faster."""
        if not self.is_disturbed:
            return {}
        same = _measured(row)
        times = row, self.time(rung, same, same)
        return max(times, key=lambda each: each["tokens_per_second"])

    def count(self, rung: Rung) -> dict[str, Any]:
        """Count what a rung's steps ask for; afterwards nothing can be timed."""
        side = _side(rung)
        engine = side.build(self.counted, side.components)
        return {"per_step": count_steps(engine, COUNTED, self.device)}

    def compare(self, side: Side) -> dict[str, Any]:
        """Compare a side with the reference on the few prompts.

        Returns:
            How many steps are equal, the largest error of a log-probability in
            roundoffs, and the first difference.
        """
        largest, steps, difference = 0.0, 0, ""
        actual = self._serve_few(side)
        for mine, theirs in zip(actual, self.expected, strict=False):
            errors = [
                float(row_errors(mine.logprobs[name], rows).max())
                for name, rows in theirs.logprobs.items()
                if name in mine.logprobs and mine.plan == theirs.plan
            ]
            largest = max([largest, *errors])
            difference = self._difference(mine, theirs, largest)
            if difference:
                # Who is to blame for a step that failed is found in later ones.
                failed = [why for each in actual for why in each.failed.values()]
                difference = f"failed with {failed[0]}" if failed else difference
                difference = f"step {theirs.step}: {difference}{self._blame(side)}"
                break
            steps += 1
        if not difference and len(actual) != len(self.expected):
            difference = f"{len(actual)} steps instead of {len(self.expected)}"
        return {
            "steps": steps,
            "largest_error_in_roundoffs": largest / UNIT_ROUNDOFF[torch.float32],
            "difference": difference,
        }

    def _difference(self, mine: StepRecord, theirs: StepRecord, error: float) -> str:
        """Say how two steps differ."""
        if mine.plan != theirs.plan:
            return "another plan"
        if error > self.bound:
            return f"log-probabilities are {error:.1e} off, at most {self.bound:.1e}"
        if mine.tokens != theirs.tokens:
            return f"tokens {mine.tokens} instead of {theirs.tokens}"
        return ""

    def _blame(self, side: Side) -> str:
        """Let the verifier name the component, if it sees a difference, too."""
        config = replace(self.config, dtype="float32")
        arrivals = [
            Arrival(prompt, greedy(FEW_TOKENS), step)
            for step, prompt in enumerate(self._few_prompts)
        ]
        verdict = verify(
            side, model=config, workload=Workload(arrivals), device=str(self.device)
        )
        blame = verdict.difference and verdict.difference.blame
        return f"; to blame: {blame}" if blame else ""

    def _set_up(self, dtype: torch.dtype, **options: Any) -> Setup:
        """Settle sizes, and make the parameters if there are none of this dtype."""
        if dtype not in self.drawn:
            fill = WITNESS.fill
            if self.folder:
                fill = Checkpoint(self.folder, self.config, self.device).fill
            self.drawn[dtype] = make_parameters(self.config, dtype, self.device, fill)
        config = EngineConfig(**options)
        sizes = plan_memory(self.config, config, self.device, dtype)
        return Setup(self.config, config, sizes, self.drawn[dtype], self.device)

    def _make_room(self) -> Setup:
        """Set up what is timed; say which of the ladder's options ask for too much."""
        load, most = self.load, self.config.max_positions
        length = load.prompt_tokens + load.new_tokens
        check_at_most("--prompt-tokens plus --new-tokens", length, most, "positions")
        try:
            return self._set_up(self.dtype, **_room(load))
        except ConfigError as error:
            cause, _, _ = str(error).partition("; lower")
            wanted = "lower --prompts or --prompt-tokens"
            raise ConfigError(f"{cause}; {wanted}") from None

    @property
    def is_disturbed(self) -> bool:
        """Whether what else a machine does is part of what is timed."""
        return choose_clock(self.device)[0] == "wall time"

    @property
    def _few_prompts(self) -> Sequence[list[int]]:
        """Prompts of which two share a block, and one is longer than a step."""
        vocab = self.config.vocab_size
        first, *ends = (tokens(n, count, vocab) for n, count in enumerate((16, 5, 3)))
        return [*(first + end for end in ends), tokens(3, 27, vocab)]

    def _serve_few(self, side: Side) -> list[StepRecord]:
        """Serve the few prompts, one more in every step."""
        engine = side.build(self.compared, side.components)
        records: list[StepRecord] = []
        for index, prompt in enumerate(self._few_prompts):
            engine.add(prompt, greedy(FEW_TOKENS), f"r{index}")
            records.append(engine.step())
        while engine.has_work:
            records.append(engine.step())
        return records

    def describe(self) -> dict[str, Any]:
        """Say what was climbed with."""
        return {
            "model": self.model,
            "weights": "the checkpoint's" if self.folder else "random",
            "layer_pattern": self.config.layer_pattern,
            "parameters": num_parameters(self.config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "workload": asdict(self.load),
            "most_seconds_of_a_run": self.seconds,
            "clock": choose_clock(self.device)[0],
            "counted": asdict(COUNTED) | {"block_size": SMALL["block_size"]},
            "equality": {
                "dtype": "float32",
                "prompt_tokens": [len(prompt) for prompt in self._few_prompts],
                "new_tokens": FEW_TOKENS,
                "bound_in_roundoffs": BUDGETS["log-probabilities"],
            },
            "rates": self.rates._asdict(),
            "notes": reports.LADDER_NOTES,
        }


def climb(
    device: str,
    model: str | None,
    counts: Sequence[int | None],
    only: Sequence[str],
    seconds: float,
    output: Path | None,
    commit: str | None,
) -> bool:
    """Climb some rungs, show what was found, and write it to a folder.

    Args:
        device: Name of a device, or ``auto``.
        model: As of `Ladder`; chosen by the device unless given, as is what follows.
        counts: Prompts, tokens of each, and tokens made of each.
        only: Names of rungs; all unless there are any.
        seconds: Most that one run of the workload may take.
        output: The folder; None for none.
        commit: The commit, where git cannot say.

    Returns:
        Whether all that can run here did, and are equal.

    Raises:
        ConfigError: A device or rung that there cannot be.
    """
    where = find_device(device)
    own, load = choose_load(where, counts)
    # From slow to fast, however they are named.
    chosen = sorted(map(_find, {*only}), key=rungs.RUNGS.index) or rungs.RUNGS
    rows: list[dict[str, Any]] = []
    with Progress(console=notes, transient=True) as progress:
        task = progress.add_task("the reference is run", total=3 * len(chosen))
        ladder = Ladder(model or own, where, load, seconds)
        found = {"environment": environment(where, commit), **ladder.describe()}
        found["rungs"] = rows
        kept = found, "ladder", where, output

        def go(
            row: dict[str, Any], does: str, do: Callable[[], dict[str, Any]]
        ) -> None:
            progress.update(task, description=f"{row['rung']} is {does}")
            if row.get("status", "equal") == "equal":
                _attempt(row, do)
            free(where)
            progress.advance(task)
            reports.write_json(*kept)

        least: Load | None = None
        for rung in chosen:
            rows.append({"rung": rung.name, "change": rung.change})
            go(rows[-1], "compared and timed", partial(ladder.climb, rung, least))
            notes.print(f"{rung.name}: {rows[-1]['status']}")
            least = _measured(rows[-1]) or least
        for rung, row in reversed([*zip(chosen, rows, strict=True)]):
            go(row, "timed again", partial(ladder.time_again, rung, row))
        for rung, row in zip(chosen, rows, strict=True):
            go(row, "counted", partial(ladder.count, rung))
    reports.show_ladder(found, console)
    reports.write(*kept, reports.draw_ladder, notes)
    return not {"unequal", "failed"} & {row["status"] for row in rows}


def _attempt(row: dict[str, Any], do: Callable[[], dict[str, Any]]) -> None:
    """Add to a row what comes of something, or why nothing does, and what it took.

    So no other rung is lost.
    """
    begin = time.perf_counter()
    try:
        row |= do()
    except Exception as error:
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    row["seconds"] = row.get("seconds", 0.0) + time.perf_counter() - begin


def _measured(row: dict[str, Any]) -> Load | None:
    """Return what a rung was timed on, if it was."""
    return Load(**row["measured"]) if "measured" in row else None


def _room(load: Load) -> dict[str, int]:
    """Return options with which all prompts of a workload fit in one step."""
    return {
        "max_requests": load.prompts,
        "max_tokens_per_step": load.prompts * load.prompt_tokens,
        "max_length": load.prompt_tokens + load.new_tokens,
        "snapshot_slots": 4 * load.prompts,
    }


def _side(rung: Rung) -> Side:
    """Return the engine of a rung."""
    return Side(rung.backend, rungs.components(rung.name), rungs.options(rung.name))


def _read_model(model: str) -> tuple[Path | None, dict[str, Any]]:
    """Return a model's folder, if it has one, and its config."""
    if model in SHAPES:
        return None, SHAPES[model]
    try:
        folder = find_folder(model)
        return folder, read_config_files(folder)
    except CheckpointError as error:
        cause, _, _ = str(error).partition(";")
        takes = f"demo, {', '.join(SHAPES)} or a checkpoint folder, with config.json"
        raise CheckpointError(f"{cause}; --model takes {takes}") from None


def _find(name: str) -> Rung:
    """Find a rung that a user names."""
    try:
        return rungs.find(name)
    except KeyError as error:
        raise ConfigError(error.args[0]) from None


def why_idle(rung: Rung, config: ModelConfig) -> str:
    """Say why a rung can change nothing for a model."""
    modules = {key.split(".")[0] for key in rung.components}
    needed = {NEEDS.get(module) for module in modules}
    if set(rung.options) == {"side_stream"}:
        needed = {MOE}
    # None is of a module that serves any layer.
    if not needed or None in needed or needed & set(config.layer_pattern):
        return ""
    return f"the model has no {' or '.join(KINDS[each] for each in needed if each)}"
