"""The reference engine with parts of the optimized side: nothing else notices."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.trace import StepRecord
from tests.engines import Run, drain, greedy, make_engine
from tests.factories import model_config
from tests.tolerances import assert_budgeted, assert_equal

POOLS = ("kv_blocks.BlockPool", "state_slots.StateSlots")
BOOKKEEPING = (*POOLS, "prefix_cache.PrefixCache", "scheduler.Scheduler")
BUILDER = ("metadata.MetadataBuilder",)
SCANS = ("scan.scan_decode", "scan.scan_prefill")
#: Shared beginnings, whole blocks and parts of them.
PROMPTS = ([1] * 40, [1] * 33 + [2] * 20, [1] * 48, [3] * 17, [1] * 40, [3] * 16 + [4])
#: Too small for what is asked of them.
TIGHT: dict[str, dict[str, Any]] = {
    "lru": {"num_blocks": 7, "snapshot_slots": 2, "max_tokens_per_step": 23},
    "ref_zero": {"num_blocks": 7, "snapshot_slots": 1, "eviction": "ref_zero"},
}


@cache
def run(tight: str, components: tuple[str, ...] = ()) -> tuple[Run, list[Any]]:
    """Serve all prompts, one more in every step; also return the pools after each."""
    swapped = dict.fromkeys(components, "optimized")
    engine = make_engine(model_config("hybrid"), components=swapped, **TIGHT[tight])
    result, pools = Run(), list[Any]()

    def note(_: StepRecord) -> None:
        pair = engine.blocks.export_state(), engine.slots.export_state()
        pools.append([asdict(pool) for pool in pair])

    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, greedy(10), request_id=f"r{index}")
        note(result.note(engine.step()))
    return drain(engine, result, note), pools


def logprobs(result: Run, name: str) -> Tensor:
    """Stack a request's log-probabilities by position."""
    rows = result.logprobs[name]
    return torch.stack([rows[position] for position in sorted(rows)])


@pytest.mark.parametrize("tight", TIGHT)
@pytest.mark.parametrize(
    "components",
    [
        POOLS,
        BOOKKEEPING,
        BUILDER,
    ],
)
def test_integers_are_the_same(components: tuple[str, ...], tight: str) -> None:
    """Every plan, pool and log-probability is as if nothing had been replaced."""
    expected, expected_pools = run(tight)
    actual, pools = run(tight, components)
    assert pools == expected_pools
    for mine, theirs in zip(actual.records, expected.records, strict=True):
        assert mine.plan == theirs.plan
        assert mine.registered_blocks == theirs.registered_blocks
        assert mine.stored_states == theirs.stored_states
    for name in expected.outputs:
        assert_equal(logprobs(actual, name), logprobs(expected, name))


def test_the_pools_were_too_small() -> None:
    """The runs that are compared evict blocks and states, and preempt."""
    plans = [record.plan for name in TIGHT for record in run(name)[0].records]
    for event in ("evicted_blocks", "evicted_states", "preempted", "deferred"):
        assert any(getattr(plan, event) for plan in plans), event


def test_scans_are_close() -> None:
    """The same tokens; log-probabilities as close as a model's may be."""
    (expected, _), (actual, _) = run("lru"), run("lru", SCANS)
    for name, output in expected.outputs.items():
        assert actual.outputs[name].token_ids == output.token_ids
        assert_budgeted("model", logprobs(actual, name), logprobs(expected, name))
