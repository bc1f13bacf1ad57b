"""Checks that cost too much for every day: poison in free memory, checksums of shared.

Both engines run them after each step when `EngineConfig.debug` asks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.blocks import BlockHash
from lockstep.config import Sizes
from lockstep.errors import IntegrityError
from lockstep.memory import Caches

#: What a block or slot is, its id, and the prefix that its content stands for.
ContentKey = tuple[str, int, BlockHash]


def poison(caches: Caches, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
    """Fill blocks and slots that nobody owns with NaN, so that any use of them shows.

    Args:
        caches: The pools; written.
        block_ids: Free blocks.
        slot_ids: Free slots.
    """
    device = caches.kv.device
    blocks = torch.tensor(block_ids, dtype=torch.int64, device=device)
    slots = torch.tensor(slot_ids, dtype=torch.int64, device=device)
    caches.kv.index_fill_(2, blocks, math.nan)
    caches.conv.index_fill_(1, slots, math.nan)
    caches.ssm.index_fill_(1, slots, math.nan)


def checksum_shared(
    caches: Caches, blocks: Mapping[int, BlockHash], states: Mapping[BlockHash, int]
) -> dict[ContentKey, int]:
    """Take the checksum of every cached block and stored state.

    Args:
        caches: The pools.
        blocks: Hash of each cached block.
        states: Slot of each stored state.
    """
    contents: dict[ContentKey, list[Tensor]] = {}
    for block, key in blocks.items():
        contents["block", block, key] = [caches.kv[:, :, block]]
    for key, slot in states.items():
        contents["state", slot, key] = [caches.conv[:, slot], caches.ssm[:, slot]]
    return {key: _checksum(tensors) for key, tensors in contents.items()}


def compare_checksums(
    before: Mapping[ContentKey, int], after: Mapping[ContentKey, int]
) -> None:
    """Check that whatever was shared before and still is has not changed by a bit.

    Raises:
        IntegrityError: Some content changed; the message names block or slot.
    """
    changed = [key[:2] for key in before if after.get(key, before[key]) != before[key]]
    if changed:
        raise IntegrityError(f"shared content changed in a step: {changed}")


def check_zero_slot(caches: Caches, sizes: Sizes) -> None:
    """Check that the state before the first token is still zero.

    Raises:
        IntegrityError: Something wrote the zero slot.
    """
    for pool in (caches.conv, caches.ssm):
        if torch.count_nonzero(pool[:, sizes.zero_slot]).item():
            raise IntegrityError("the zero slot was written")


def _checksum(tensors: list[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        raw = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy()
        total = zlib.crc32(raw.tobytes(), total)
    return total
