"""What is not offered, and what cannot work, is refused by name and with its limit."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig
from lockstep.assemble import MOST_PLACES, _check_grid
from lockstep.config import NOT_OFFERED, engine_options
from lockstep.errors import (
    ConfigError,
    PlanError,
    UnsupportedModelError,
)
from lockstep.families import read_model_config
from lockstep.memory import plan_memory
from lockstep.optimized.metadata import _host_extents
from lockstep.plan import RowKind, StepPlan
from tests.engines import Run, greedy, make_engine
from tests.scenarios.common import (
    BLOCK,
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    text,
    tiny,
    watched,
)

MODULE = "engine"

MODEL = tiny("M*")
FOUR = greedy(4)
CPU = torch.device("cpu")


def configure(**options: Any) -> EngineConfig:
    """Set options, whatever their type."""
    return EngineConfig(**options)


def settle(**options: Any) -> Any:
    """Settle the sizes of an engine for the tiny model."""
    return plan_memory(MODEL, configure(**options), CPU, torch.float32)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"max_tokens_per_step": 16 * 65_527}, True),
        ({"max_tokens_per_step": 16 * 65_528}, False),
        ({"max_requests": 16_383, "max_tokens_per_step": 2**14}, True),
        ({"max_requests": 16_384, "max_tokens_per_step": 2**14}, False),
    ],
)
def test_a_step_too_large_for_a_launch(options: dict[str, Any], fits: bool) -> None:
    """Rows and scan chunks are counted before anything is launched."""
    small = {"max_requests": 4, "num_blocks": 8, "snapshot_slots": 0}
    small |= {"scan_chunk_size": 16, "graphs": "padded"}
    sizes = settle(**{**small, **options})
    extents = [_host_extents(each, sizes, False) for each in sizes.graph_shapes]
    most = max(max(e.scan_chunks, e.prefills + e.snapshots) for e in extents)
    assert fits is (most <= MOST_PLACES)
    refusal = pytest.raises(ConfigError, match="kernels take 65535 of either")
    with nullcontext() if fits else refusal:
        _check_grid(MODEL, sizes)


# Not offered.


@pytest.mark.parametrize("option", sorted(NOT_OFFERED))
def test_an_option_of_other_engines_is_refused(option: str) -> None:
    """Speculation, offload, parallel stages and the like: by name, in words."""
    with pytest.raises(ConfigError, match=f"{option}: {NOT_OFFERED[option]} is not"):
        engine_options(EngineConfig(), {option: 2})
    with pytest.raises(TypeError, match=option):
        configure(**{option: 2})
    options: dict[str, Any] = {"device": "cpu", "verbose": False, option: 2}
    with pytest.raises(ConfigError, match=f"{option}: {NOT_OFFERED[option]} is not"):
        LLM.from_config(MODEL, **options)


def test_what_is_not_offered_covers_the_list() -> None:
    """Each thing that an engine of this kind may have, and this one has not."""
    assert set(NOT_OFFERED.values()) >= {
        "speculative decoding",
        "offloading",
        "pipeline stages",
        "tensor parallelism",
        "multi-token prediction",
    }
    assert not set(NOT_OFFERED) & {f.name for f in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("name", ["kv_dtype", "ssm_state_dtype"])
@pytest.mark.parametrize("value", ["fp8", "float8_e4m3fn", "fp8_e5m2", "int8"])
def test_caches_of_8_bits_are_refused(name: str, value: str) -> None:
    """No scales are measured, so none can be measured wrongly."""
    with pytest.raises(ConfigError, match=f"{name} is '{value}'; 8-bit caches are not"):
        configure(**{name: value})


def test_a_misspelt_option_is_refused() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match="'max_request'; known are max_requests"):
        engine_options(EngineConfig(), {"max_request": 2})


def test_a_quantized_checkpoint_is_refused() -> None:
    """Its config says so; guessing would load noise."""
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read_model_config({"model_type": "nemotron_h", "quantization_config": {"x": 1}})


@pytest.mark.parametrize(
    ("option", "value"),
    [("graphs", "padded"), ("kernels", "torch"), ("side_stream", True)],
)
def test_options_of_the_other_backend_are_refused(option: str, value: Any) -> None:
    """The reference runs eagerly, and does not pretend otherwise."""
    with pytest.raises(ConfigError, match=f'{option}=.*backend="reference"'):
        make_engine(MODEL, **{option: value})


def test_unknown_backends_and_components_are_refused(side: str) -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigError, match="'fast'; known are reference, optimized"):
        make_engine(MODEL, "fast")
    with pytest.raises(ConfigError, match="scan.scan_fast.*known are .*scan_prefill"):
        make_engine(MODEL, side, components={"scan.scan_fast": "reference"})


# Bad sizes.

BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("max_requests", 0, "at least 1"),
    ("max_requests", -3, "at least 1"),
    ("max_requests", 2.0, "an integer"),
    ("max_requests", True, "an integer"),
    ("max_requests", "4", "an integer"),
    ("max_tokens_per_step", 0, "at least 1"),
    ("max_length", 0, "at least 1"),
    ("max_length", -1, "at least 1"),
    ("block_size", 0, "at least 1"),
    ("scan_chunk_size", 0, "at least 1"),
    ("num_blocks", 0, "at least 1"),
    ("snapshot_slots", -1, "at least 0"),
    ("memory_fraction", 0.0, "between 0 and 1"),
    ("memory_fraction", 1.5, "between 0 and 1"),
    ("memory_fraction", math.nan, "between 0 and 1"),
    ("snapshot_fraction", -0.1, "between 0 and 1"),
    ("eviction", "fifo", "known are lru, ref_zero"),
    ("ssm_state_dtype", "half", "known are float32"),
    ("kv_dtype", "double", "known are"),
    ("debug", ("everything",), "known are integrity"),
    ("debug", "poison", "a tuple of checks"),
    ("prefix_caching", 1, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_OPTIONS)
def test_a_bad_option_is_refused(name: str, value: Any, message: str) -> None:
    """The message names the option and what it may be."""
    with pytest.raises(ConfigError, match=f"{name} is .*{message}"):
        configure(**{name: value})


@pytest.mark.parametrize("chunk", [1, 8, 24, 48, 96, 512])
def test_a_scan_chunk_that_no_tier_has_is_refused(chunk: int) -> None:
    """Odd sizes would need masks that nobody wrote."""
    with pytest.raises(ConfigError, match=f"scan_chunk_size is {chunk}; .*16, 32, 64"):
        settle(scan_chunk_size=chunk)


@pytest.mark.parametrize(
    ("chunk", "block", "instead"), [(64, 96, 128), (16, 8, 16), (16, 40, 48)]
)
def test_a_block_of_broken_scan_chunks_is_refused(
    chunk: int, block: int, instead: int
) -> None:
    """At its end no state would be known; the message has a size that works."""
    message = f"block_size {block} .* scan chunk {chunk}.* use {instead}"
    with pytest.raises(ConfigError, match=message):
        settle(scan_chunk_size=chunk, block_size=block)
    assert settle(scan_chunk_size=chunk, block_size=instead).block_size == instead


def test_a_length_beyond_the_model_is_refused() -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match="max_length is 257; .* 256 positions"):
        settle(max_length=257)
    assert settle(max_length=256).max_length == 256


def test_memory_in_which_nothing_fits_is_refused() -> None:
    """The message says what takes how much, and what to change."""
    with pytest.raises(ConfigError, match="no K/V block.* fits.*lower max_requests"):
        settle(memory_fraction=1e-6)


# Plans that cannot be replayed.


def recorded(side: str, **options: Any) -> tuple[Any, list[StepPlan]]:
    """Return an engine with two requests, and the plans that finish them elsewhere."""
    engines = [make_engine(MODEL, side, **o) for o in ({}, options)]
    plans: list[StepPlan] = []
    for engine in engines:
        for name in ("a", "b"):
            engine.add(text(20, seed=ord(name)), FOUR, name)
    while engines[0].has_work:
        plans.append(engines[0].step().plan)
    return engines[1], plans


def second_step(plans: list[StepPlan]) -> StepPlan:
    """Return the second plan."""
    return plans[1]


def two_rows_of_one(plans: list[StepPlan]) -> StepPlan:
    """Name the first request twice."""
    return StepPlan(rows=[*plans[0].rows, plans[0].rows[0]])


def beyond_its_tokens(plans: list[StepPlan]) -> StepPlan:
    """Compute more tokens than there are."""
    return StepPlan(rows=[dataclasses.replace(plans[0].rows[0], end=21)])


def without_tokens(plans: list[StepPlan]) -> StepPlan:
    """Compute nothing."""
    return StepPlan(rows=[dataclasses.replace(plans[0].rows[0], end=0)])


def of_a_stranger(plans: list[StepPlan]) -> StepPlan:
    """Name nobody."""
    return StepPlan(rows=[dataclasses.replace(plans[0].rows[0], request_id="c")])


def skipping_the_unknown(plans: list[StepPlan]) -> StepPlan:
    """Skip tokens that are not cached."""
    return StepPlan(rows=[dataclasses.replace(plans[0].rows[0], start=16)])


def decoding_a_prompt(plans: list[StepPlan]) -> StepPlan:
    """Decode what was not even admitted."""
    row = dataclasses.replace(plans[0].rows[0], kind=RowKind.DECODE)
    return StepPlan(rows=[row])


def preempting_who_waits(plans: list[StepPlan]) -> StepPlan:
    """Take memory from a request that has none."""
    return dataclasses.replace(plans[0], preempted=["b"])


def as_recorded(plans: list[StepPlan]) -> StepPlan:
    """Return the first plan."""
    return plans[0]


BAD_PLANS: list[tuple[Any, dict[str, Any], str]] = [
    (second_step, {}, "tokens 20 to 21 of 'a', which has 20"),
    (two_rows_of_one, {}, "two rows of one request"),
    (beyond_its_tokens, {}, "tokens 0 to 21 of 'a', which has 20"),
    (without_tokens, {}, "tokens 0 to 0 of 'a'"),
    (of_a_stranger, {}, "no unfinished request is named 'c'"),
    (skipping_the_unknown, {}, "skips 16 of 20 tokens; 0 are cached"),
    (decoding_a_prompt, {}, "no decode row"),
    (preempting_who_waits, {}, "'b' cannot be preempted"),
    (as_recorded, {"max_tokens_per_step": 30}, "40 tokens; a step may 30"),
    (as_recorded, {"max_requests": 1}, "to admit 'b'"),
    (as_recorded, {"num_blocks": 3}, "to admit 'b'"),
]


@pytest.mark.parametrize(("change", "options", "message"), BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused(
    side: str, change: Any, options: dict[str, Any], message: str
) -> None:
    """The caller hears why, and the engine goes on by plans of its own."""
    engine, plans = recorded(side, **options)
    with pytest.raises(PlanError, match=message):
        engine.step(plan=change(plans))
    engine.check_integrity()
    run = drain_equal(engine, FOUR)
    assert {output.finish_reason for output in run.outputs.values()} == {"length"}
    assert_nothing_held(engine)


def test_a_plan_that_fits_is_replayed(side: str) -> None:
    """Same rows, same results, with what another engine had cached and without."""
    engine, plans = recorded(side)
    run = Run()
    for plan in plans:
        record = run.note(engine.step(plan=plan))
        assert [dataclasses.replace(r, cache=None) for r in record.rows] == [
            dataclasses.replace(r, cache=None) for r in plan.rows
        ]
    drain_equal(engine, FOUR, run)
    assert len(run.outputs) == 2
    # A plan that skips nothing is carried out, though the cache could skip.
    engine.add(text(20, seed=ord("a")), FOUR, "a")
    run = Run()
    record = run.note(engine.step(plan=StepPlan(rows=[plans[0].rows[0]])))
    assert record.rows[0].start == 0 and record.rows[0].num_shared_blocks == 1
    drain_equal(engine, FOUR, run)
    assert ask(engine, branch(text(20, ord("a")), 30, 1)).cache.num_skipped_tokens == (
        BLOCK
    )


def test_forced_tokens_take_the_place_of_those_drawn(side: str) -> None:
    """The request goes on from the token it was given."""
    calls: list[int] = []
    count = watched(side, "sample", lambda *_: calls.append(1))
    engine = make_engine(MODEL, side, components={"sampler.sample": count})
    name = engine.add(text(10), FOUR)
    outputs: list[Any] = []
    forced = [7, 8, 9, 10]
    for token in forced:
        outputs += engine.step(tokens={name: token, "another": 3}).finished
    assert outputs[0].token_ids == forced and len(calls) == 4
