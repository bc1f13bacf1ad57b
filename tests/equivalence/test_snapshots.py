"""Copies of all states at once against one after another: bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.memory import Caches
from tests.factories import fresh_caches, load, model_config, plan_sizes, randn
from tests.host_reads import no_host_reads
from tests.tolerances import assert_equal

SIZES = plan_sizes(model_config("hybrid"))
DUMMY = SIZES.dummy_slot


def caches() -> Caches:
    """Fill live slots and half the snapshots; all else is NaN, or zero."""
    made = fresh_caches(model_config("hybrid"))
    for seed, pool in enumerate((made.conv, made.ssm)):
        used = pool[:, : SIZES.first_snapshot_slot + 3]
        used.copy_(randn(*used.shape, seed=seed))
    return made


def copy(side: str, sources: list[int], targets: list[int]) -> tuple[Tensor, ...]:
    """Copy on one side, and return all that anybody may read afterwards."""
    made = caches()
    load(side, "snapshots").copy_states(
        made,
        torch.tensor(sources, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        DUMMY,
    )
    return made.kv, made.conv[:, :DUMMY], made.ssm[:, :DUMMY]


@given(
    sources=st.permutations(range(SIZES.max_requests)),
    targets=st.permutations(range(SIZES.first_snapshot_slot, SIZES.zero_slot)),
    is_stored=st.lists(st.booleans(), min_size=4, max_size=4),
    count=st.integers(0, SIZES.max_requests),
    padding=st.integers(0, 3),
)
def test_twins(
    sources: list[int],
    targets: list[int],
    is_stored: list[bool],
    count: int,
    padding: int,
) -> None:
    """Any rows, stored or not, and padded ones, which copy NaN to the dummy slot."""
    wanted = [t if s else DUMMY for t, s in zip(targets, is_stored, strict=False)]
    real = sources[:count], wanted[:count]
    padded = [[*ids, *[DUMMY] * padding] for ids in real]
    for actual, expected in zip(
        copy("optimized", *padded), copy("reference", *real), strict=True
    ):
        assert_equal(actual, expected)


def test_nothing_is_stored_by_padding(side: str) -> None:
    """Rows of which nothing is kept leave everything as it was."""
    before = caches()
    after = copy(side, [0, 2, DUMMY, DUMMY], [DUMMY] * 4)
    expected = before.kv, before.conv[:, :DUMMY], before.ssm[:, :DUMMY]
    for actual, pool in zip(after, expected, strict=True):
        assert_equal(actual, pool)


def test_nothing_is_read_back() -> None:
    """The host never waits for a number from the device."""
    made, slots = caches(), torch.tensor([1, 0, DUMMY])
    targets = torch.tensor([SIZES.first_snapshot_slot, DUMMY, DUMMY])
    with no_host_reads():
        load("optimized", "snapshots").copy_states(made, slots, targets, DUMMY)
