"""Graphs, prefixes and slices together, on a GPU and held to the reference.

The published scenarios as they stand, and what they never reach: a state stored in a
step in which another is restored, slices after the first, evictions; all of it in
graphs, which replay the bits of eager steps at their shapes: in few bits, nearly any
token is close enough to the reference's. Then engines that stay warm for long, and
engines that come and go while others use the GPU. `tests/equivalence` plays scenes and
soak at padded shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import DTypeName, ModelConfig
from lockstep.trace import StepRecord
from tests.engines import CPU, assert_equals_lone, greedy, make_engine, serve
from tests.factories import model_config
from tests.following import Twin
from tests.graph_scenes import (
    CASES,
    Note,
    config_of,
    follow_scene,
    modes_by_kind,
    record,
    twin_for,
)
from tests.matrix import MODELS, Recording, Taken
from tests.scenarios.common import text
from tests.soaking import assert_passes_equal
from tests.tolerances import assert_equal

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
#: Engines of one process: as many as came before a capture failed elsewhere.
NUM_ENGINES = 20


@pytest.mark.parametrize("graphs", ["decode", "all"])
@pytest.mark.parametrize(("name", "model", "dtype"), CASES)
def test_a_scene_in_graphs(
    name: str, model: str, dtype: DTypeName, graphs: str, record_property: Note
) -> None:
    """Each kind of step is seen and replayed where it is to be, as the reference."""
    config = config_of(model, dtype)
    records = follow_scene(name, config, graphs, CUDA, record_property)
    other = "graph" if graphs == "all" else "eager"
    for kind, modes in modes_by_kind(records).items():
        assert modes == {"graph" if kind == "decode" else other}, kind
    for each in records:
        assert bool(each.eager_reason) == (each.mode == "eager")
    # Elsewhere prompts are computed at their own sizes.
    if graphs == "all":
        assert_replays(name, config)


def assert_replays(name: str, config: ModelConfig) -> None:
    """Hold what graphs give in a scene to eager steps at padded shapes, bit by bit."""
    recording = record(name, config, CPU if config.dtype == "float32" else CUDA)
    graphed, eager = (twin_for(name, config, g, CUDA) for g in ("all", "padded"))
    steps = zip(taken(recording, graphed), taken(recording, eager), strict=True)
    for (mine, drawn), (theirs, expected) in steps:
        assert (mine.mode, theirs.mode) == ("graph", "padded")
        assert mine.padded_shape == theirs.padded_shape
        assert list(mine.logprobs) == list(theirs.logprobs)
        for request_id, values in mine.logprobs.items():
            assert_equal(values, theirs.logprobs[request_id])
        assert_equal(drawn, expected)


def taken(recording: Recording, twin: Twin) -> Iterator[tuple[StepRecord, Tensor]]:
    """Take the steps of a recording, with its tokens.

    Yields:
        What each with rows gave, and what it drew.
    """
    twin.begin()
    for operation in recording.operations:
        if not isinstance(operation, Taken):
            twin.engine.add(operation.prompt, operation.sampling, operation.request_id)
            continue
        tokens = operation.record.tokens
        step, _ = twin.step(tokens=tokens)
        if step.rows:
            assert len(twin.drawn) >= len(tokens)
            yield step, twin.drawn[: len(tokens)]


def test_every_pass_equals_the_first(record_property: Note) -> None:
    """Fifty prompts, five times on one engine, every step a graph of Triton kernels."""
    assert_passes_equal(MODELS["moe"], "all", CUDA, record_property)


class Neighbour(threading.Thread):
    """Uses the GPU on a stream of its own, and waits for that stream alone.

    Attributes:
        rounds: How often it has computed something and found it right.
        error: What went wrong.
    """

    def __init__(self) -> None:
        """Get ready; library handles are made at the first product."""
        super().__init__(daemon=True)
        self.rounds = 0
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._started = threading.Event()

    def run(self) -> None:
        """Allocate, multiply, read and let go, until told to stop."""
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not self._stopping.is_set():
                    # Sizes change, so that memory is asked of the driver as well.
                    size = 64 + 64 * (self.rounds % 16)
                    ones = torch.ones(size, size, device=CUDA)
                    assert float((ones @ ones).sum()) == size**3
                    self.rounds += 1
                    if self.rounds == 16:
                        self._started.set()
        except BaseException as error:
            self.error = error
        finally:
            self._started.set()

    def __enter__(self) -> Neighbour:
        """Begin, and wait until each size has been tried, for which kernels load."""
        self.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and raise what went wrong."""
        self._stopping.set()
        self.join()
        if self.error is not None:
            raise self.error


def test_engines_come_while_another_thread_uses_the_gpu() -> None:
    """Twenty captured one after another beside it; all are right, and so is it."""
    config, sampling = model_config("hybrid"), greedy(4)
    sizes: dict[str, Any] = {"max_tokens_per_step": 40, "debug": ("integrity",)}
    with Neighbour() as neighbour:
        for number in range(NUM_ENGINES):
            before = neighbour.rounds
            engine = make_engine(
                config, "optimized", device=CUDA, graphs="all", **sizes
            )
            assert neighbour.rounds > before, neighbour.error
            outputs, run = serve(engine, [text(20, number), text(33, number)], sampling)
            assert {record.mode for record in run.records} == {"graph"}
            for output in outputs:
                assert_equals_lone(config, output, run, sampling, CUDA)
