"""Copies of states: exact, complete, and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.memory import Caches
from tests.factories import fresh_caches, load, model_config, plan_sizes, randn
from tests.tolerances import assert_equal

SIZES = plan_sizes(model_config("mamba"))
DUMMY = SIZES.dummy_slot


def filled_caches() -> Caches:
    """Allocate pools and fill every slot with numbers of its own."""
    caches = fresh_caches(model_config("mamba"))
    for seed, pool in enumerate((caches.conv, caches.ssm)):
        pool.copy_(randn(*pool.shape, seed=seed))
    return caches


@given(
    sources=st.permutations(range(SIZES.max_requests)),
    targets=st.permutations(range(SIZES.first_snapshot_slot, SIZES.zero_slot)),
    is_stored=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_copies_states_of_all_layers(
    side: str, sources: list[int], targets: list[int], is_stored: list[bool]
) -> None:
    """Targets equal their sources in every layer; all else stays as it was."""
    caches = filled_caches()
    expected = [pool.clone() for pool in caches.tensors()]
    wanted = [
        target if stored else DUMMY
        for target, stored in zip(targets, is_stored, strict=False)
    ]
    for source, target in zip(sources, wanted, strict=True):
        if target != DUMMY:
            for pool in expected[1:]:
                pool[:, target] = pool[:, source]
    load(side, "snapshots").copy_states(
        caches, torch.tensor(sources), torch.tensor(wanted), DUMMY
    )
    for actual, pool in zip(caches.tensors(), expected, strict=True):
        # What the dummy slot holds is nobody's business.
        assert_equal(actual[:, :DUMMY], pool[:, :DUMMY])


def test_nothing_to_copy(side: str) -> None:
    """A step may have no decode row, and a model no state."""
    nothing = torch.zeros(0, dtype=torch.int64)
    for name in ("mamba", "attention"):
        caches = fresh_caches(model_config(name))
        load(side, "snapshots").copy_states(caches, nothing, nothing, DUMMY)


def test_models_without_state(side: str) -> None:
    """Decode rows of a model without Mamba layers copy nothing."""
    caches, slots = fresh_caches(model_config("attention")), torch.arange(3)
    load(side, "snapshots").copy_states(caches, slots, slots + 5, DUMMY)
