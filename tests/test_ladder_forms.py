"""Forms that a rung replaced: each answers what the reference answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.ladder import loop_copies, scalar_reads, single_transfers, staging
from tests.engines import drain, greedy, make_engine
from tests.equivalence import test_kv_blocks as blocks
from tests.equivalence import test_metadata as metadata
from tests.equivalence import test_snapshots as snapshots
from tests.equivalence import test_state_slots as slots
from tests.factories import DEVICE, model_config
from tests.host_reads import recorded_host_reads
from tests.plans import build, make_sizes, steps
from tests.tolerances import assert_equal

STAGING = (
    staging.ModelByRequests,
    staging.ModelByPrefills,
    staging.ModelWithLoop,
)


@pytest.mark.parametrize("eviction", blocks.POLICIES)
@given(trace=blocks.TRACES)
def test_block_pool(eviction: str, trace: list[tuple[Any, ...]]) -> None:
    """The same blocks and evictions, also after a reset and a takeover."""
    sides = [blocks.Tables("reference", eviction) for _ in range(2)]
    sides[1].pool = scalar_reads.BlockPool(blocks.NUM_BLOCKS, sides[0].pool.eviction)
    for operation, *arguments in trace:
        answers = [getattr(side, operation)(*arguments) for side in sides]
        assert answers[0] == answers[1], operation
        blocks.assert_twins(sides)
    state = sides[0].pool.export_state()
    sides[1].pool.reset()
    sides[1].pool.import_state(state)
    blocks.assert_twins(sides)


@given(trace=slots.TRACES, snapshot_slots=st.integers(0, 5))
def test_state_slots(trace: list[tuple[str, int]], snapshot_slots: int) -> None:
    """The same slots and evictions, also after a reset and a takeover."""
    sides = [slots.User("reference", 3, snapshot_slots) for _ in range(2)]
    sides[1].slots = scalar_reads.StateSlots(3, snapshot_slots)
    for operation, name in trace:
        answers = [getattr(side, operation)(name) for side in sides]
        assert answers[0] == answers[1], operation
        assert sides[0].seen() == sides[1].seen()
    for side in sides:
        side.end_step()
        side.slots.check_integrity(side.live, side.slots.export_state().stored)
    state = sides[0].slots.export_state()
    sides[1].slots.reset()
    sides[1].slots.import_state(state)
    assert sides[0].seen() == sides[1].seen()


def test_scalars_are_read_one_by_one() -> None:
    """What made it slow is there: an operation waits for the device again and again."""
    pool = scalar_reads.BlockPool(8, "lru")
    with recorded_host_reads() as reads:
        pool.release(pool.allocate(8).block_ids)
    assert reads.count("item") > 16


@given(
    sources=st.permutations(range(snapshots.SIZES.max_requests)),
    targets=st.permutations(
        range(snapshots.SIZES.first_snapshot_slot, snapshots.SIZES.zero_slot)
    ),
    is_stored=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_copies(sources: list[int], targets: list[int], is_stored: list[bool]) -> None:
    """The same states in the same slots."""
    dummy = snapshots.DUMMY
    wanted = [t if s else dummy for t, s in zip(targets, is_stored, strict=False)]
    made, count = snapshots.caches(), len(wanted)
    ids = torch.tensor(sources[:count]), torch.tensor(wanted)
    loop_copies.copy_states(made, *ids, dummy)
    expected = snapshots.copy("reference", sources[:count], wanted)
    seen = made.kv, made.conv[:, :dummy], made.ssm[:, :dummy]
    for actual, copied in zip(seen, expected, strict=True):
        assert_equal(actual, copied)


@given(data=st.data(), all_logits=st.booleans())
def test_transfers(data: st.DataObject, all_logits: bool) -> None:
    """The same arrays, however they travel."""
    sizes = make_sizes()
    step = data.draw(steps(sizes))
    builder = single_transfers.MetadataBuilder(sizes, DEVICE)
    actual = builder.build(*step, all_logits)
    expected = build("reference", sizes, step, all_logits)
    metadata.assert_same_batch(actual, expected)


@pytest.mark.parametrize("graphs", ["off", "padded"])
@pytest.mark.parametrize("form", STAGING)
def test_staging(form: type, graphs: str) -> None:
    """States that were staged are those stored in place, bit for bit."""
    engines = [
        make_engine(
            model_config("hybrid"),
            "optimized",
            components=components,
            graphs=graphs,
            max_tokens_per_step=23,
            num_blocks=9,
        )
        for components in ({}, {"model.Model": form})
    ]
    for engine in engines:
        for index, prompt in enumerate(([1] * 40, [1] * 33 + [2] * 20, [1] * 49)):
            engine.add(prompt, greedy(6), request_id=f"r{index}")
    while engines[0].has_work:
        expected, actual = (engine.step() for engine in engines)
        assert actual.tokens == expected.tokens
        for pool, other in zip(*map(used, engines), strict=True):
            assert_equal(other, pool)
    drain(engines[1])
    assert engines[1].slots.export_state().stored


def used(engine: Any) -> tuple[Tensor, ...]:
    """Return the pools without slots and blocks that only padding writes."""
    caches, sizes = engine.caches, engine.sizes
    kv = caches.kv[:, :, : sizes.dummy_block]
    return kv, caches.conv[:, : sizes.dummy_slot], caches.ssm[:, : sizes.dummy_slot]
