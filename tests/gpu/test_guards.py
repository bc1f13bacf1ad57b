"""Guards around whatever an engine has on a GPU, buffers of graphs included.

What is made while a graph is captured has none: see `tests/guards.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import DTypeName
from lockstep.optimized.kernels.sampler import log_probabilities
from tests.engines import Run, greedy
from tests.factories import model_config
from tests.guards import (
    FAULTS,
    ZONE,
    Fault,
    GuardError,
    Guards,
    drain_guarded,
    make_guarded,
    write,
)
from tests.scenarios.common import is_mixed, text

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
#: Tensors at fixed addresses, by the lines that make them; the last is for graphs.
FIXED = (
    "kv=torch.zeros",
    "conv=torch.zeros",
    "ssm=torch.zeros",
    "self._device = torch.zeros",
    "self._logits = torch.zeros_like",
)
MODES = {"padded": {"padded"}, "decode": {"graph", "eager"}, "all": {"graph"}}


def start(dtype: DTypeName = "float32", **options: Any) -> tuple[Any, Guards]:
    """Build an engine with few shapes."""
    options = {"max_tokens_per_step": 40, "debug": ("integrity",), **options}
    return make_guarded(
        replace(model_config("hybrid"), dtype=dtype), device=CUDA, **options
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(
    ("graphs", "side_stream"),
    [("padded", False), ("decode", False), ("all", False), ("all", True)],
)
def test_every_step_leaves_guards_whole(
    graphs: str, side_stream: bool, kernels: str, dtype: DTypeName
) -> None:
    """Replays and eager steps of all kinds; states stored, restored, and forgotten."""
    options = {"graphs": graphs, "kernels": kernels, "side_stream": side_stream}
    engine, guards = start(dtype, **options)
    for name in FIXED[: -1 if graphs == "padded" else None]:
        assert any(made.startswith(name) for made in guards.names), name
    run = Run()
    for turn in ("first", "second"):
        for index, length in enumerate((45, 10, 31, 1)):
            engine.add(text(length, index), greedy(8), f"{turn}-{index}")
        drain_guarded(engine, guards, run)
        engine.add(text(45), greedy(8), f"{turn}-again")
        drain_guarded(engine, guards, run)
        assert run.outputs[f"{turn}-again"].cache.num_skipped_tokens == 32
        engine.reset()
    assert any(map(is_mixed, run.records))
    assert any(row.snapshots for record in run.records for row in record.rows)
    assert {record.mode for record in run.records} == MODES[graphs]
    for values in run.logprobs.values():
        assert all(value.isfinite().all() for value in values.values())


def _write_before_logits(logits: Tensor) -> Tensor:
    write(logits, ZONE // logits.element_size() - 1)
    return log_probabilities(logits)


#: A graph hands its logits over in a buffer, which there is on a GPU alone.
FAULTS_HERE = FAULTS | {
    "something writes before the logits": Fault(
        "sampler.log_probabilities",
        _write_before_logits,
        "self._logits = torch.zeros_like",
        "before its begin",
    )
}


@pytest.mark.parametrize("fault", FAULTS_HERE.values(), ids=list(FAULTS_HERE))
def test_a_write_next_to_a_tensor_is_seen(fault: Fault) -> None:
    """Zones are whole once all is captured; the first step breaks one."""
    is_fixed = fault.tensor.startswith(FIXED)
    engine, guards = start(
        graphs="all" if is_fixed else "padded",
        kernels="triton",
        components={fault.key: fault.function},
    )
    guards.check()
    engine.add(text(18), greedy(3))
    with pytest.raises(GuardError, match=f"{re.escape(fault.tensor)}.*{fault.end}"):
        drain_guarded(engine, guards)
