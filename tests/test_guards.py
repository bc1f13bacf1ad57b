"""Guards stay whole around an engine that is right, and show one that is not.

That they do around one of kernels is seen in `tests/kernels/test_engine.py`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lockstep.memory import allocate_caches
from lockstep.optimized.buffers import StepBuffer
from tests.engines import CPU, Run, greedy
from tests.factories import ENGINE, model_config, plan_sizes
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
from tests.scenarios.common import is_mixed, text, tiny

#: Tensors at fixed addresses, by the lines that make them.
FIXED = ("kv=torch.zeros", "conv=torch.zeros", "ssm=torch.zeros", "self._device =")
MODELS = {"torch": model_config("hybrid"), "triton": tiny("M*E-")}


def start(kernels: str, **options: Any) -> tuple[Any, Guards]:
    """Build an engine, small enough to be interpreted."""
    return make_guarded(
        MODELS[kernels],
        kernels=kernels,
        max_requests=3,
        max_tokens_per_step=24,
        **options,
    )


@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_every_step_leaves_guards_whole(graphs: str) -> None:
    """Prefill, decode, both at once; states stored, and one restored."""
    engine, guards = start("torch", graphs=graphs)
    run = Run()
    # Without padded shapes, there is nothing for a buffer to hold.
    for name in FIXED if graphs == "padded" else FIXED[:3]:
        assert any(made.startswith(name) for made in guards.names), name
    for index, length in enumerate((18, 5, 20)):
        engine.add(text(length, seed=index), greedy(3))
    drain_guarded(engine, guards, run)
    again = engine.add(text(20, seed=2), greedy(3))
    drain_guarded(engine, guards, run)
    shapes = [record.shape for record in run.records]
    assert any(map(is_mixed, run.records))
    assert any(not s.prefill_requests for s in shapes)
    assert any(not s.decode_requests for s in shapes)
    assert any(row.snapshots for record in run.records for row in record.rows)
    assert run.outputs[again].cache.num_skipped_tokens == 16
    for values in run.logprobs.values():
        assert all(value.isfinite().all() for value in values.values())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_write_next_to_a_tensor_is_seen(fault: Fault) -> None:
    """Whatever is next to it, and at whichever end; the tensor is named."""
    parts = {fault.key: fault.function}
    engine, guards = start("triton", graphs="padded", components=parts)
    guards.check()
    for index, length in enumerate((18, 5)):
        engine.add(text(length, seed=index), greedy(3))
    with pytest.raises(GuardError, match=f"{re.escape(fault.tensor)}.*{fault.end}"):
        drain_guarded(engine, guards)


def test_each_end_of_every_pool_is_guarded() -> None:
    """From the first byte off to the last of a zone; what is in it may be written."""
    config = model_config("hybrid")
    for name in ("kv", "conv", "ssm"):
        for shift, is_behind in ((-1, 0), (-ZONE // 4, 0), (0, 1), (ZONE // 4 - 1, 1)):
            guards = Guards()
            with guards:
                sizes = plan_sizes(config)
                caches = allocate_caches(config, ENGINE, sizes, torch.float32, CPU)
            pool = getattr(caches, name)
            assert not pool.any()
            guards.settle()
            pool.fill_(1)
            guards.check()
            begin = pool.storage_offset()
            write(pool, begin + shift + is_behind * pool.numel())
            side = "past its end" if is_behind else "before its begin"
            with pytest.raises(GuardError, match=f"^{name}=torch.zeros.*{side}"):
                guards.check()


def test_a_buffer_of_any_size_is_guarded() -> None:
    """Also where its end is odd; -1 is seen like any other number."""
    for size in (5, 16):
        guards = Guards()
        with guards:
            buffer = StepBuffer(size, CPU)
        guards.settle()
        guards.check()
        device = buffer._device
        device.as_strided((1,), (1,), device.storage_offset() + size).fill_(255)
        device.as_strided((1,), (1,), device.storage_offset() + size + 1).fill_(255)
        with pytest.raises(GuardError, match="self._device = .*: 1 bytes past its end"):
            guards.check()


def test_what_is_read_from_a_zone_is_no_number() -> None:
    """In any dtype; and memory that nobody wrote is none either."""
    guards = Guards()
    with guards:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            made = torch.zeros(3, dtype=dtype)
            count = ZONE // made.element_size()
            for begin in (0, count + 3):
                zone = made.as_strided((count,), (1,), begin)
                assert zone.isnan().all()
            assert torch.empty_like(made).isnan().all()
            assert not made.any()


def test_what_passes_is_checked_once() -> None:
    """Tensors of a step are looked at when it ends, and forgotten."""
    guards = Guards()
    with guards:
        made = torch.zeros(3)
    write(made, int(made.storage_offset()) - 1)
    with pytest.raises(GuardError, match="made by a test"):
        guards.check()
    guards.check()
    assert not guards.names
