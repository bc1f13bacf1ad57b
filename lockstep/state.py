"""An engine's whole state in plain form, so that one engine can take over another's.

Both sides export and import the same form, whatever they keep inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.blocks import BlockHash
from lockstep.memory import Caches
from lockstep.request import Request


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
    """

    free_live: list[int] = field(default_factory=list[int])
    free_snapshots: list[int] = field(default_factory=list[int])
    stored: dict[BlockHash, int] = field(default_factory=dict[BlockHash, int])
    last_use: dict[int, int] = field(default_factory=dict[int, int])
    clock: int = 0


@dataclass
class EngineState:
    """Everything an engine knows between two steps.

    Attributes:
        step: Steps taken.
        arrivals: Requests that ever arrived.
        admissions: Admissions so far.
        waiting: The queue, in order of arrival.
        running: Requests with blocks and a live slot, in order of admission.
        blocks: Bookkeeping of the K/V blocks.
        slots: Bookkeeping of the state slots.
        caches: Copies of both pools.
    """

    step: int
    arrivals: int
    admissions: int
    waiting: list[Request]
    running: list[Request]
    blocks: BlockPoolState
    slots: StateSlotsState
    caches: Caches
