"""Scenes in which graphs, prefixes and slices meet: played once, followed in any way.

Three are published (see `tests/scenarios/test_upstream.py`, which has their models and
prompts); the others reach what those leave out. Each scene says what must be seen of
it in the reference's record, whatever the engine that follows it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

import torch

from lockstep.config import DTypeName, ModelConfig
from lockstep.plan import RowKind
from lockstep.trace import StepRecord
from tests.engines import CPU, greedy, make_engine
from tests.following import Ties, Twin, follow, twin_of
from tests.matrix import Recorder, Recording, default_device
from tests.scenarios.common import branch, is_mixed, text
from tests.scenarios.test_upstream import (
    BLOCK,
    LONG,
    MODELS,
    NEW,
    PROMPTS,
    STEM,
    VOCAB,
    options,
)

Note = Callable[[str, object], None]


@dataclass(frozen=True)
class Scene:
    """Prompts and the sizes of the engine that serves them.

    Attributes:
        play: Does everything to a recorder's engine.
        models: Which of the published models it is for.
        events: What must be seen, as `seen_in` names it.
        sizes: Sizes other than the published ones.
    """

    play: Callable[[Recorder], None]
    models: tuple[str, ...]
    events: frozenset[str]
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def max_requests(self) -> int:
        """Requests at once; all else an engine can be resized to."""
        return dict(self.sizes).get("max_requests", 16)


def waves(*counts: int) -> Callable[[Recorder], None]:
    """Let prompts come in waves, each when all of the one before decode."""

    def play(recorder: Recorder) -> None:
        names = iter(enumerate(PROMPTS))
        for count in counts:
            for number, prompt in [next(names) for _ in range(count)]:
                recorder.add(f"r{number}", prompt, greedy(NEW))
            drawn: set[str] = set()
            while len(drawn) < count:
                drawn |= set(recorder.step().tokens)
        recorder.drain()

    return play


def leave_in_slices(recorder: Recorder) -> None:
    """A prompt seeds the cache, a long one leaves it, one is the seed again."""
    recorder.add("r0", STEM, greedy(NEW))
    recorder.drain()
    recorder.add("r1", branch(STEM[:BLOCK], 800, 7), greedy(NEW))
    recorder.add("r2", STEM, greedy(NEW))
    recorder.drain()


def serve_long(recorder: Recorder) -> None:
    """Three prompts that share nothing."""
    for number, prompt in enumerate(LONG):
        recorder.add(f"r{number}", prompt, greedy(NEW))
    recorder.drain()


def restore_beside_a_snapshot(recorder: Recorder) -> None:
    """One row stores states that it has just computed while another restores one."""
    recorder.add("seed", STEM, greedy(NEW))
    recorder.drain()
    recorder.add("new", text(3 * BLOCK + 40, 11, VOCAB), greedy(NEW))
    recorder.add("again", STEM, greedy(NEW))
    recorder.drain()


def evict(recorder: Recorder) -> None:
    """Prompts in turn, more than pools hold; an evicted one comes again, and again."""
    for turn in range(2):
        for number, seed in enumerate((21, 22, 23, 24)):
            prompt = text(BLOCK + 60 + number, seed, VOCAB)
            recorder.add(f"{turn}-{number}", prompt, greedy(NEW))
            recorder.drain()
    recorder.add("hit", text(BLOCK + 63, 24, VOCAB), greedy(NEW))
    recorder.add("miss", text(BLOCK + 60, 21, VOCAB), greedy(NEW))
    recorder.drain()


BOTH = ("attention", "hybrid")
ALL_KINDS = frozenset({"prefill", "decode"})
SCENES = {
    "prefixes at once": Scene(waves(4), BOTH, ALL_KINDS | {"skipped"}),
    "prefixes in waves": Scene(waves(2, 2), BOTH, ALL_KINDS | {"mixed", "skipped"}),
    "prefix and slices": Scene(
        leave_in_slices,
        ("hybrid",),
        ALL_KINDS | {"skipped", "restored beside a snapshot", "later slice"},
        (("max_tokens_per_step", 400),),
    ),
    "prefix and long slices": Scene(
        leave_in_slices,
        ("hybrid",),
        ALL_KINDS | {"skipped", "restored beside a snapshot"},
        (("max_tokens_per_step", 1200),),
    ),
    "slices": Scene(
        serve_long,
        BOTH,
        ALL_KINDS | {"mixed", "later slice"},
        (("max_tokens_per_step", 768), ("max_requests", 128)),
    ),
    "whole": Scene(serve_long, BOTH, ALL_KINDS, (("max_requests", 128),)),
    "restore beside a snapshot": Scene(
        restore_beside_a_snapshot,
        ("hybrid",),
        ALL_KINDS | {"restored beside a snapshot"},
    ),
    "eviction": Scene(
        evict,
        BOTH,
        ALL_KINDS | {"skipped", "evicted", "skipped after an eviction"},
        (("num_blocks", 4), ("snapshot_slots", 2), ("max_tokens_per_step", 256)),
    ),
}
#: Scenes with models; as published, attention alone is in float32 and its class. Those
#: of one engine are neighbours.
CASES: list[tuple[str, str, DTypeName]] = [
    (name, model, dtype)
    for model, dtypes in (("attention", 1), ("hybrid", 2))
    for dtype in get_args(DTypeName)[:dtypes]
    for name, scene in sorted(SCENES.items(), key=lambda item: item[1].max_requests)
    if model in scene.models
]


def config_of(model: str, dtype: DTypeName) -> ModelConfig:
    """Return a published model in a dtype."""
    return replace(MODELS[model], dtype=dtype)


@lru_cache(maxsize=2)
def record(name: str, config: ModelConfig, device: torch.device = CPU) -> Recording:
    """Play a scene on the reference, which is fastest on a CPU.

    In few bits, the device must be that of the engine which follows.
    """
    scene = SCENES[name]
    with default_device(device):
        sizes = dict(options(**dict(scene.sizes)))
        recorder = Recorder(make_engine(config, debug=(), device=device, **sizes))
        scene.play(recorder)
    return recorder.recording


def twin_for(name: str, config: ModelConfig, graphs: str, device: torch.device) -> Twin:
    """Take an engine with the sizes of a scene; those of many requests are apart."""
    scene = SCENES[name]
    largest = options(max_requests=scene.max_requests)
    twin = twin_of(config, graphs, largest, device)
    twin.resize(**dict(options(**dict(scene.sizes))))
    return twin


def follow_scene(
    name: str, config: ModelConfig, graphs: str, device: torch.device, note: Note
) -> list[StepRecord]:
    """Hold the optimized engine to the reference in a scene.

    Returns:
        The records of steps with rows.
    """
    played_on = CPU if config.dtype == "float32" else device
    recording = record(name, config, played_on)
    missing = SCENES[name].events - seen_in(recording.records)
    assert not missing, f"never seen: {sorted(missing)}"
    ties = Ties()
    twin = twin_for(name, config, graphs, device)
    records = follow(recording, twin, ties, False)
    ties.report(note, config.dtype)
    return [each for each in records if each.rows]


def kind_of(each: StepRecord) -> str:
    """Say what the rows of a step do."""
    if is_mixed(each):
        return "mixed"
    return "prefill" if each.shape.prefill_requests else "decode"


def seen_in(records: Sequence[StepRecord]) -> set[str]:
    """Name what is seen in steps."""
    return {event for events in _events(records) for event in events}


def _events(records: Sequence[StepRecord]) -> Iterator[set[str]]:
    has_evicted = False
    for each in records:
        if not each.rows:
            continue
        prefills = [row for row in each.rows if row.kind is RowKind.PREFILL]
        stores = [row for row in prefills if row.snapshots]
        admitted = [row for row in prefills if row.cache is not None]
        skips = [row for row in admitted if row.start]
        yield {kind_of(each)}
        yield {"skipped"} if skips else set()
        yield {"later slice"} if len(admitted) < len(prefills) else set()
        others = [row for row in skips if any(row is not each for each in stores)]
        yield {"restored beside a snapshot"} if others else set()
        yield {"skipped after an eviction"} if skips and has_evicted else set()
        if each.plan.evicted_blocks or each.plan.evicted_states:
            has_evicted = True
            yield {"evicted"}


def modes_by_kind(records: Sequence[StepRecord]) -> dict[str, set[str]]:
    """List in which modes each kind of step was run."""
    found: dict[str, set[str]] = {}
    for each in records:
        found.setdefault(kind_of(each), set()).add(each.mode)
    return found
