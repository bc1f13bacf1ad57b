"""Whole engines of Triton kernels, interpreted: the reference's tokens and states."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import AttentionConfig, MambaConfig
from lockstep.errors import ConfigError
from lockstep.plan import BatchShape
from tests.engines import assert_equals_lone, greedy, make_engine
from tests.guards import drain_guarded, make_guarded
from tests.kernels.compiling import recorded
from tests.scenarios.common import is_mixed, text, tiny

#: A step takes tenths of a second, so there are few.
MODEL = tiny("M*E-", vocab_size=61)
SAMPLING = greedy(3)


@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_an_engine_of_kernels_equals_the_reference(graphs: str) -> None:
    """Prompts in company, one of them cut; then one again, from a stored state.

    Nothing is written next to a tensor meanwhile.
    """
    engine, guards = make_guarded(
        MODEL, kernels="triton", graphs=graphs, max_requests=3, max_tokens_per_step=24
    )
    for index, length in enumerate((18, 5, 20)):
        engine.add(text(length, seed=index), SAMPLING)
    run = drain_guarded(engine, guards)
    assert any(map(is_mixed, run.records))
    assert any(row.snapshots for record in run.records for row in record.rows)
    again = engine.add(text(20, seed=2), SAMPLING)
    run = drain_guarded(engine, guards, run)
    assert run.outputs[again].cache.num_skipped_tokens == 16
    for output in run.outputs.values():
        assert_equals_lone(MODEL, output, run, SAMPLING)


WIDE: dict[str, Any] = {
    "4096 channels and 16": {"mamba": MambaConfig(2, 4096, 16, 1, scan_chunk_size=16)},
    "1024 channels, 2 to": {"attention": AttentionConfig(2, 1, 1024)},
    "16 channels, 4096 to": {"attention": AttentionConfig(4096, 1, 16)},
}


@pytest.mark.parametrize("numbers", WIDE)
def test_heads_that_fit_no_tile_are_refused(numbers: str) -> None:
    """When the engine is built, with the way out, which is one."""
    config = tiny("M*", **WIDE[numbers])
    options: dict[str, Any] = {"block_size": 128, "debug": ()}
    with pytest.raises(ConfigError, match=f'{numbers}.*kernels="torch"'):
        make_engine(config, "optimized", kernels="triton", **options)
    make_engine(config, "optimized", kernels="torch", **options)


def launches(max_requests: int) -> list[tuple[BatchShape, list[object]]]:
    """Name what each padded step would launch, and how many programs of it."""
    engine = make_engine(
        MODEL,
        "optimized",
        kernels="triton",
        graphs="padded",
        max_requests=max_requests,
        record_logprobs=False,
        debug=(),
    )
    found: list[tuple[BatchShape, list[object]]] = []

    def step() -> None:
        # Where nothing is computed, nothing is drawn either.
        record = engine.step(tokens=dict.fromkeys(names, 1))
        assert not record.interrupted and not record.failed, record.failed
        shapes.append(record.padded_shape)

    names: list[str] = []
    for lengths in ((20,), (18, 5, 20), ()):
        names += [engine.add(text(n, seed=n), SAMPLING) for n in lengths]
        shapes: list[BatchShape] = []
        made = recorded(step)
        found.append((shapes[0], [(each.name, each.grid) for each in made]))
    return found


def test_no_launch_is_as_large_as_the_pool() -> None:
    """Steps of one shape launch as much, however many requests there may be."""
    found = launches(4)
    assert [shape.prefill_requests for shape, _ in found] == [1, 4, 0]
    assert all(made for _, made in found)
    assert launches(128) == found
