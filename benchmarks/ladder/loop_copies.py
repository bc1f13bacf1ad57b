"""Copies of states in a loop, one for each state, layer and pool.

What it was: a step that kept states went through them, and for each through the layers.

Why it was slow: a hybrid model of 23 Mamba layers needs 46 launches for one state, each
far shorter than what it costs to start it; and the loop must know the slots, so it
reads them from the device first.

What replaced it: one indexed copy for each pool, over all rows and layers, in which
rows that keep nothing fill the dummy slot (`optimized/snapshots.py`).
"""

from __future__ import annotations

from lockstep.memory import Caches
from lockstep.shapes import PerDecode


def copy_states(
    caches: Caches,
    source_slot_ids: PerDecode,
    target_slot_ids: PerDecode,
    dummy_slot: int,
) -> None:
    """Copy each state by itself, layer after layer."""
    pairs = zip(source_slot_ids.tolist(), target_slot_ids.tolist(), strict=True)
    for source, target in pairs:
        if target == dummy_slot:
            continue
        for pool in caches.tensors()[1:]:
            for layer in pool:
                layer[target] = layer[source]
