"""The bookkeeping of both pools in plain form, the same for both sides.

Whatever a side keeps inside, it exports and imports this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.blocks import BlockHash


@dataclass
class BlockPoolState:
    """Bookkeeping of the K/V blocks.

    Attributes:
        free: Free block ids; the last is taken next.
        holders: How many requests hold each block that is held.
        hashes: Hash of each cached block.
        parents: Cached block before each cached block that is not a first one.
        last_use: When each cached block was last let go.
        clock: Count of releases.
    """

    free: list[int] = field(default_factory=list[int])
    holders: dict[int, int] = field(default_factory=dict[int, int])
    hashes: dict[int, BlockHash] = field(default_factory=dict[int, BlockHash])
    parents: dict[int, int] = field(default_factory=dict[int, int])
    last_use: dict[int, int] = field(default_factory=dict[int, int])
    clock: int = 0


@dataclass
class StateSlotsState:
    """Bookkeeping of the state slots.

    Attributes:
        free_live: Free live slots; the last is taken next.
        free_snapshots: Free snapshot slots; the last is taken next.
        stored: Slot of each stored state, by the hash of the block it follows.
        last_use: When each stored state was last stored or restored.
        clock: Count of such moments.
        replaceable: Stored states that the request which stored them may replace.
    """

    free_live: list[int] = field(default_factory=list[int])
    free_snapshots: list[int] = field(default_factory=list[int])
    stored: dict[BlockHash, int] = field(default_factory=dict[BlockHash, int])
    last_use: dict[int, int] = field(default_factory=dict[int, int])
    clock: int = 0
    replaceable: set[BlockHash] = field(default_factory=set[BlockHash])
