"""Copies of whole states from slot to slot.

States inside a prompt are stored where they arise, by `conv1d.conv_prefill` and
`scan.scan_prefill`; what remains is to keep the state of a request that decodes.
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
    """Copy the conv window and SSM state of every layer from slots to other slots.

    Nothing is computed on the way, so a copy equals its source bit for bit.

    Args:
        caches: The pools; target slots are written.
        source_slot_ids: Slot of each state to copy.
        target_slot_ids: Slot that takes it.
        dummy_slot: As a target it means that nothing is to be copied.
    """
    pairs = zip(source_slot_ids.tolist(), target_slot_ids.tolist(), strict=True)
    for source, target in pairs:
        if target != dummy_slot:
            caches.conv[:, target] = caches.conv[:, source]
            caches.ssm[:, target] = caches.ssm[:, source]
