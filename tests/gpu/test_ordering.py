"""What is late is waited for: one copy or stream at a time is held up for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines import Run, drain, greedy, make_engine
from tests.factories import load, model_config
from tests.scenarios.common import text
from tests.tolerances import assert_equal

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
#: Cycles of the GPU, some 50 ms: many times what the host needs for a step.
LATE = 100_000_000
#: Without checks, which read from the device, the host runs ahead of it.
UNCHECKED: dict[str, Any] = {"debug": (), "max_tokens_per_step": 16}


def delay(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a stream sleep before whatever a function gives it to do."""

    def delayed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(LATE)
        return function(*args, **kwargs)

    return delayed


def play(engine: Any) -> tuple[Run, list[Tensor]]:
    """Serve prompts of many slices, of which nothing is read, then some tokens.

    Returns:
        What the steps gave, and all that may be read of the pools afterwards.
    """
    for index, length in enumerate((150, 40, 7)):
        engine.add(text(length, seed=index), greedy(6, logprobs=2), f"{index}")
    run = drain(engine)
    sizes = engine.sizes
    kv, conv, ssm = engine.export_state().caches.tensors()
    states = [pool[:, : sizes.dummy_slot] for pool in (conv, ssm)]
    return run, [kv[:, :, : sizes.dummy_block], *states]


def assert_nothing_changes(late: Any, **options: Any) -> None:
    """Hold an engine of which something is late to one without, bit by bit.

    Options are those of the other one, which has a single stream.
    """
    expected, expected_pools = play(start(**options))
    actual, pools = play(late)
    assert len(actual.records) == len(expected.records)
    for mine, theirs in zip(actual.records, expected.records, strict=True):
        assert mine.plan == theirs.plan
        assert mine.tokens == theirs.tokens
        assert mine.reported == theirs.reported
        assert list(mine.logprobs) == list(theirs.logprobs)
        for request_id, values in mine.logprobs.items():
            assert_equal(values, theirs.logprobs[request_id])
    for pool, expected_pool in zip(pools, expected_pools, strict=True):
        assert_equal(pool, expected_pool)


def start(graphs: str = "padded", **options: Any) -> Any:
    """Build an engine whose host runs ahead of the device."""
    config = model_config("hybrid")
    return make_engine(
        config, "optimized", device=CUDA, graphs=graphs, **UNCHECKED, **options
    )


@pytest.mark.parametrize("graphs", ["padded", "all"])
def test_copies_that_are_late(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not write the next but one step over one not yet copied."""
    engine = start(graphs)
    buffer = engine.metadata._buffer
    monkeypatch.setattr(buffer, "send", delay(buffer.send))
    assert_nothing_changes(engine, graphs=graphs)


def test_a_buffer_waits_for_its_last_copy() -> None:
    """Each copy takes what was sent with it, however much later it runs."""
    buffer = load("optimized", "buffers").StepBuffer(4096, CUDA)
    found: list[Tensor] = []
    for turn in range(6):
        torch.cuda._sleep(LATE)
        sent = buffer.send("key", {"ids": np.full(100, turn)})
        found.append(sent["ids"].clone())
    for turn, ids in enumerate(found):
        assert_equal(ids.cpu(), torch.full((100,), turn))


def test_arrays_sent_once_are_kept_until_copied() -> None:
    """Pinned memory is given to nobody else before a copy that is late."""
    send_once = load("optimized", "buffers").send_once
    found: list[Tensor] = []
    for turn in range(6):
        torch.cuda._sleep(LATE)
        found.append(send_once({"ids": np.full(100, turn)}, CUDA)["ids"])
    for turn, ids in enumerate(found):
        assert_equal(ids.cpu(), torch.full((100,), turn))


@pytest.mark.parametrize("graphs", ["padded", "all"])
def test_a_side_stream_that_is_late(graphs: str) -> None:
    """What it computes is added when it has come, and is what one stream computes.

    A graph is captured with the delay, and sleeps as long at each replay.
    """
    base, seconds = load("optimized", "streams").Model, list[Any]()

    class Late(base):
        def _run_both(self, first: Callable[[], Tensor], second: Any) -> Any:
            seconds.append(second)
            return super()._run_both(first, delay(second))

    parts = {"model.Model": Late}
    engine = start(graphs, components=parts, side_stream=True)
    assert type(engine.model) is Late
    assert_nothing_changes(engine, graphs=graphs, side_stream=False)
    assert seconds


@pytest.mark.parametrize("graphs", ["padded", "all"])
@pytest.mark.parametrize("side_stream", [False, True])
def test_a_main_stream_that_is_late(side_stream: bool, graphs: str) -> None:
    """The side stream does not begin before it, within a graph either."""
    base = load("optimized", "streams" if side_stream else "model").Model
    late = type("Late", (base,), {"forward": delay(base.forward)})
    parts = {"model.Model": late}
    engine = start(graphs, components=parts, side_stream=side_stream)
    assert type(engine.model) is late
    assert_nothing_changes(engine, graphs=graphs, side_stream=False)


@pytest.mark.parametrize("graphs", ["padded", "all"])
def test_draws_that_are_late(graphs: str) -> None:
    """Tokens and reports are read when they have come."""
    sample = delay(load("optimized", "sampler").sample)
    parts = {"sampler.sample": sample}
    assert_nothing_changes(start(graphs, components=parts), graphs=graphs)
