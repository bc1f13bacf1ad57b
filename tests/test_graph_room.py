"""Whether a device has room for graphs is asked before any is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.optimized import graphs
from lockstep.optimized.graphs import GraphRunner
from tests.engines import make_engine
from tests.factories import model_config

#: Bytes of a pass, and of a device that has just room for its graphs.
PASS = 1000
ENOUGH = PASS + graphs._CAPTURE_BYTES


class Device:
    """Stands in for what torch says of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        """Have so much memory free."""
        self.captured = 0
        peaks = {"memory_allocated": 500, "max_memory_allocated": 500 + PASS}
        for name, value in peaks.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, ENOUGH))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    def capture(self, *_: Any, **__: Any) -> torch.inference_mode:
        """Count a capture, and let what is within it run."""
        self.captured += 1
        return torch.inference_mode()


def capture() -> None:
    """Capture all graphs of a small engine, on a device that is said to be there."""
    runner: GraphRunner = make_engine(
        model_config("mlp"), "optimized", graphs="padded", record_logprobs=False
    ).graphs
    with torch.inference_mode():
        for _ in runner.capture():
            pass


def test_a_full_device_is_told_before_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte decides."""
    device = Device(monkeypatch, free=ENOUGH - 1)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory for graphs"):
        capture()
    assert not device.captured
    device = Device(monkeypatch, free=ENOUGH)
    capture()
    assert device.captured


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2 MiB", ConfigError),
        ("Triton Error [CUDA]: out of memory\nmore", ConfigError),
        ("CUDA error: misaligned address", RuntimeError),
    ],
)
def test_an_engine_says_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, message: str, expected: type[Exception]
) -> None:
    """However it came to be out of memory; what else fails is not renamed."""

    def fail(self: GraphRunner) -> Any:
        raise RuntimeError(message)
        yield

    engine = make_engine(model_config("mlp"), "optimized", graphs="padded")
    monkeypatch.setattr(GraphRunner, "capture", fail)
    object.__setattr__(engine.engine_config, "graphs", "all")
    with pytest.raises(expected) as caught:
        engine._start()
    says_what = "lower memory_fraction" in str(caught.value)
    assert says_what == (expected is ConfigError)
    assert message.partition("\n")[0] in str(caught.value)
    assert "more" not in str(caught.value)
