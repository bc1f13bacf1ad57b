"""Copies of whole states from slot to slot, all rows and layers at once."""

from __future__ import annotations

from lockstep.memory import Caches
from lockstep.shapes import PerDecode


def copy_states(
    caches: Caches,
    source_slot_ids: PerDecode,
    target_slot_ids: PerDecode,
    dummy_slot: int,
) -> None:
    """Copy the states of all rows; those of which nothing is kept fill the dummy slot.

    Which of these ends up there is undefined, and nobody reads it. So the number of
    copies never depends on the numbers in the arrays.

    Cost: two launches for each pool; each row's state is read and written twice, and a
    copy of it is alive between.
    """
    for pool in caches.tensors()[1:]:
        pool[:, target_slot_ids] = pool[:, source_slot_ids]
