"""The optimized engine on a GPU: captured graphs replay what eager steps compute."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.config import DTypeName, ModelConfig
from lockstep.trace import StepRecord
from tests.engines import Run, assert_equals_lone, drain, greedy, make_engine
from tests.factories import model_config
from tests.scenarios.common import is_mixed, text
from tests.tolerances import assert_equal

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16")
MODES = ("off", "padded", "decode", "all")
KERNELS = ("torch", "triton")


def start(config: ModelConfig, graphs: str, **options: Any) -> Any:
    """Build an optimized engine with few shapes."""
    options = {"max_tokens_per_step": 40, "debug": ("integrity",), **options}
    return make_engine(config, "optimized", device=CUDA, graphs=graphs, **options)


def play(engine: Any, seed: int = 0) -> Run:
    """Serve prompts of many lengths, some with a cached prefix, in steps of all kinds.

    Afterwards the longest comes again, so that a stored state is restored.
    """
    run = Run()
    for index, length in enumerate((45, 10, 31, 1)):
        engine.add(text(length, seed + index), greedy(8), f"first-{seed}-{index}")
    drain(engine, run)
    engine.add(text(45, seed), greedy(8), f"again-{seed}")
    return drain(engine, run)


def spoil_before_steps(engine: Any) -> None:
    """Fill what no row may read: the last step's logits and arrays, and the dummies."""
    step, sizes = engine.step, engine.sizes

    def spoil_and_step() -> StepRecord:
        kv, *states = engine.caches.tensors()
        # The logits were made in this mode.
        with torch.inference_mode():
            engine.graphs._logits.fill_(math.nan)
            engine.metadata._buffer._device.fill_(0xFF)
            kv[:, :, sizes.dummy_block] = math.nan
            for pool in states:
                pool[:, sizes.dummy_slot] = math.nan
        return step()

    engine.step = spoil_and_step


def assert_extremes(engine: Any, records: Sequence[StepRecord]) -> None:
    """See that all slots were filled, and sizes were largest, least, and largest."""
    slots = [{row.slot_id for row in record.rows} for record in records]
    assert any({0, engine.sizes.max_requests - 1} <= each for each in slots)
    sizes = [record.padded_shape.tokens for record in records]
    least = sizes.index(min(sizes), sizes.index(max(sizes)))
    assert min(sizes) == 1 and max(sizes) in sizes[least:]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("graphs", MODES)
def test_it_equals_the_reference(graphs: str, kernels: str) -> None:
    """In float32, whatever a step is run by; every kind of step really is."""
    config = model_config("hybrid")
    run = play(start(config, graphs, kernels=kernels))
    for output in run.outputs.values():
        assert_equals_lone(config, output, run, greedy(8), CUDA)
    assert any(map(is_mixed, run.records))
    assert any(row.snapshots for record in run.records for row in record.rows)
    assert run.outputs["again-0"].cache.num_skipped_tokens == 32
    modes = {record.mode for record in run.records}
    decodes = {r.mode for r in run.records if not r.shape.prefill_requests}
    assert (
        modes
        == {
            "off": {"eager"},
            "padded": {"padded"},
            "decode": {"eager", "graph"},
            "all": {"graph"},
        }[graphs]
    )
    assert graphs != "decode" or decodes == {"graph"}
    for record in run.records:
        assert (record.mode == "eager") == bool(record.eager_reason or graphs == "off")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_a_replay_equals_the_eager_step(
    name: str, dtype: DTypeName, kernels: str
) -> None:
    """Bit for bit at the same padded shape, again and again, large and small.

    Rows are in the first and in the last slot; what padding reads, and what the last
    step left of its logits and index arrays, is spoiled.
    """
    config = replace(model_config(name), dtype=dtype)
    runs = [Run(), Run()]
    engines = [start(config, g, kernels=kernels) for g in ("padded", "all")]
    for engine in engines:
        spoil_before_steps(engine)
    for seed in (0, 10, 0):
        for engine, run in zip(engines, runs, strict=True):
            engine.reset()
            new = play(engine, seed)
            run.records += new.records
            run.outputs |= new.outputs
    eager, graphed = runs
    assert {record.mode for record in graphed.records} == {"graph"}
    assert_extremes(engines[1], graphed.records)
    for mine, theirs in zip(graphed.records, eager.records, strict=True):
        assert mine.padded_shape == theirs.padded_shape
        assert mine.tokens == theirs.tokens
        for request_id, values in mine.logprobs.items():
            assert_equal(values, theirs.logprobs[request_id])
            assert not values.isnan().any()
    # In dummies, which come last, padded rows overwrite each other in any order.
    for pools in zip(
        *(e.export_state().caches.tensors() for e in engines), strict=True
    ):
        mine, theirs = (pool.movedim(2 if pool.ndim == 6 else 1, 0) for pool in pools)
        assert_equal(mine[:-1], theirs[:-1])


def test_many_passes_equal_the_first() -> None:
    """One warm engine, its cache emptied in between, does not drift."""
    engine = start(model_config("hybrid"), "all")
    passes: list[dict[str, list[int]]] = []
    for _ in range(5):
        run = play(engine)
        passes.append({name: out.token_ids for name, out in run.outputs.items()})
        engine.reset()
    assert all(each == passes[0] for each in passes)


def test_engines_come_and_go() -> None:
    """Twenty engines built and captured in one process leave their memory behind."""
    config, used = model_config("hybrid"), list[int]()
    for _ in range(20):
        engine = start(config, "decode")
        engine.add(text(20), greedy(4))
        assert len(drain(engine).outputs) == 1
        del engine
        gc.collect()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[1]


def test_a_dropped_engine_spoils_no_capture() -> None:
    """Its graphs are freed by the garbage collector, which may run at any moment."""
    config = model_config("hybrid")
    often, before = 1, gc.get_threshold()
    gc.set_threshold(often)
    try:
        for _ in range(3):
            engine = start(config, "all")
            engine.itself = engine
            engine.add(text(20), greedy(4))
            assert {record.mode for record in drain(engine).records} == {"graph"}
            del engine
    finally:
        gc.set_threshold(*before)
