"""The block pool with its bookkeeping in arrays, one entry for each block.

Beside the reference's maps it keeps two counts, children cached on top of each block
and blocks that can be evicted, so that no operation looks at more than the blocks it is
about; only an eviction scans the pool, once for all blocks it frees.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from operator import is_not
from typing import Any, NamedTuple

import numpy as np

from lockstep.blocks import BlockHash
from lockstep.config import Eviction
from lockstep.errors import IntegrityError, OutOfBlocksError
from lockstep.state import BlockPoolState

#: Parent, or time of use, of a block that has none.
_NONE = -1


class Allocation(NamedTuple):
    """As on the other side."""

    block_ids: list[int]
    evicted: list[BlockHash]


class BlockPool:
    """The same ids and hashes as the reference's, for a few array operations a call."""

    def __init__(self, num_blocks: int, eviction: Eviction) -> None:
        """Start with every block free."""
        self.num_blocks = num_blocks
        self.eviction: Eviction = eviction
        self.reset()

    def reset(self) -> None:
        """Forget everything; every block is free again."""
        size = self.num_blocks
        self._stack = np.arange(size)[::-1].copy()
        self._num_free = size
        self._holders = np.zeros(size, np.int64)
        self._hashes = np.full(size, None, object)
        self._is_known = np.zeros(size, np.bool_)
        self._parents = np.full(size, _NONE)
        self._num_children = np.zeros(size, np.int64)
        self._last_use = np.full(size, _NONE)
        self._by_hash: dict[BlockHash, int] = {}
        self._num_evictable = 0
        self._clock = 0

    @property
    def num_free(self) -> int:
        """A counter."""
        return self._num_free

    @property
    def num_evictable(self) -> int:
        """A counter, kept where holders change."""
        return self._num_evictable

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Find the block with this content."""
        return self._by_hash.get(block_hash)

    def match(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Find the cached blocks of a prefix, without a Python statement for each."""
        found = map(self._by_hash.get, block_hashes)
        return list(takewhile(partial(is_not, None), found))  # type: ignore[arg-type]

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold blocks, each as often as it is named."""
        self._add_holders(block_ids, 1)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo `pin`."""
        self._add_holders(block_ids, -1)

    def allocate(self, count: int) -> Allocation:
        """Take blocks from the top of the stack, after one eviction of all that lack.

        Cost: nothing for no blocks; without eviction a slice; with it one pass over the
        pool and a heap of at most ``count`` leaves.
        """
        if not count:
            return Allocation([], [])
        if count > self._num_free + self._num_evictable:
            raise OutOfBlocksError(
                f"{count} blocks are needed; {self.num_free} are free and "
                f"{self.num_evictable} more can be evicted, of {self.num_blocks}"
            )
        evicted = self._evict(count - self._num_free)
        self._num_free -= count
        taken = self._stack[self._num_free : self._num_free + count][::-1]
        self._holders[taken] = 1
        return Allocation(taken.tolist(), evicted)

    def register(
        self, block_id: int, block_hash: BlockHash, parent_id: int | None
    ) -> int:
        """Make a held block known by its hash, and count it as its parent's child."""
        known = self._by_hash.get(block_hash, block_id)
        if known != block_id:
            self.pin([known])
            self.unpin([block_id])
            self._push(np.array([block_id]))
        elif not self._is_known[block_id]:
            if parent_id is not None:
                is_known = bool(self._is_known[parent_id])
                _require(is_known, f"parent {parent_id} is not cached")
                self._parents[block_id] = parent_id
                self._num_children[parent_id] += 1
            self._hashes[block_id] = block_hash
            self._is_known[block_id] = True
            self._by_hash[block_hash] = block_id
            self._last_use[block_id] = self._clock
        return known

    def release(self, block_ids: Sequence[int]) -> list[BlockHash]:
        """Let go of a block table, all blocks at once.

        A block named several times counts where the reference meets it last: at its
        first place, since that goes through the table from the end.
        """
        self._clock += 1
        unique = self._add_holders(block_ids, -1)[::-1]
        gone = unique[self._holders[unique] == 0]
        is_known = self._is_known[gone]
        dropped: list[BlockHash] = []
        if self.eviction == "ref_zero":
            dropped = self._forget(gone[is_known])
            self._push(gone)
        else:
            self._last_use[gone[is_known]] = self._clock
            self._push(gone[~is_known])
        return dropped

    def export_state(self) -> BlockPoolState:
        """Copy the bookkeeping into its plain form: one pass over the pool."""
        return BlockPoolState(
            free=self._stack[: self._num_free].tolist(),
            holders=_as_dict(self._holders != 0, self._holders),
            hashes=_as_dict(self._is_known, self._hashes),
            parents=_as_dict(self._parents != _NONE, self._parents),
            last_use=_as_dict(self._last_use != _NONE, self._last_use),
            clock=self._clock,
        )

    def import_state(self, state: BlockPoolState) -> None:
        """Take over bookkeeping exported by either side; counts are made anew."""
        self.reset()
        self._num_free = len(state.free)
        self._stack[: self._num_free] = state.free
        for array, values in (
            (self._holders, state.holders),
            (self._hashes, state.hashes),
            (self._parents, state.parents),
            (self._last_use, state.last_use),
        ):
            array[list(values)] = list(values.values())
        self._is_known[list(state.hashes)] = True
        self._by_hash = {value: block for block, value in state.hashes.items()}
        self._num_children = self._count(list(state.parents.values()))
        self._num_evictable = self._count_idle()
        self._clock = state.clock

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Check every invariant in a few passes over the pool."""
        held = [block for table in tables for block in table]
        counts = self._count(held)
        for block in np.flatnonzero(counts != self._holders):
            raise IntegrityError(
                f"block {block} counts {self._holders[block]} holders; "
                f"{counts[block]} tables contain it"
            )
        for table in tables:
            _require(len(set(table)) == len(table), f"a table repeats a block: {table}")
        free = self._count(self._stack[: self._num_free])
        cached = self._is_known & (self._holders == 0)
        _require(
            bool((free + (counts > 0) + cached == 1).all()),
            f"{self._num_free} free + {np.count_nonzero(counts)} held + "
            f"{np.count_nonzero(cached)} cached blocks are not {self.num_blocks} "
            "different ones",
        )
        self._check_chains()
        self._check_counts()

    def _check_chains(self) -> None:
        known = np.flatnonzero(self._is_known)
        hashed = [block for block, key in enumerate(self._hashes) if key is not None]
        _require(
            known.tolist() == hashed
            and len(known) == len(self._by_hash)
            and all(self.lookup(self._hashes[block]) == block for block in hashed),
            "the two hash maps are not inverse to each other",
        )
        _require(
            np.array_equal(self._last_use != _NONE, self._is_known),
            "blocks with a hash and blocks with a time of use differ",
        )
        for block in np.flatnonzero(self._parents != _NONE):
            parent = self._parents[block]
            _require(
                bool(self._is_known[block] and self._is_known[parent]),
                f"block {block} is cached on top of {parent}, which is not",
            )
            _require(
                bool(self._holders[parent] or not self._holders[block]),
                f"block {block} is held, its parent {parent} is not",
            )

    def _check_counts(self) -> None:
        parents = self._parents[self._parents != _NONE]
        _require(
            np.array_equal(self._num_children, self._count(parents)),
            "children are not counted right",
        )
        _require(
            self._num_evictable == self._count_idle(),
            f"{self._num_evictable} blocks are counted as evictable; "
            f"{self._count_idle()} are",
        )

    def _add_holders(self, block_ids: Sequence[int], change: int) -> np.ndarray:
        """Count holders up or down; return the blocks, each once, by first place."""
        unique = np.array(list(dict.fromkeys(block_ids)), np.int64)
        idle_before = self._count_idle(unique)
        # An indexed sum would count a block that is named twice once.
        np.add.at(self._holders, np.array(block_ids, np.int64), change)
        self._num_evictable += self._count_idle(unique) - idle_before
        return unique

    def _count_idle(self, blocks: np.ndarray | slice = slice(None)) -> int:
        """Count the cached blocks, of these or of all, that nobody holds."""
        is_idle = self._is_known[blocks] & (self._holders[blocks] == 0)
        return int(np.count_nonzero(is_idle))

    def _count(self, blocks: np.ndarray | list[int]) -> np.ndarray:
        """Count how often each block of the pool is named."""
        return np.bincount(np.array(blocks, np.int64), minlength=self.num_blocks)

    def _push(self, blocks: np.ndarray) -> None:
        self._stack[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)

    def _evict(self, count: int) -> list[BlockHash]:
        """Free cached blocks, leaves first, the least recently used first.

        Of the leaves that there are at the start only the ``count`` oldest can go. The
        heap holds these, and each parent once its last child has gone.
        """
        if count <= 0:
            return []
        heap = self._oldest_leaves(count)
        victims: list[int] = []
        uncovered: Counter[int] = Counter()
        for _ in range(count):
            victims.append(heapq.heappop(heap) % self.num_blocks)
            parent = int(self._parents[victims[-1]])
            uncovered[parent] += 1
            if parent != _NONE and self._is_bare(parent, uncovered[parent]):
                use = int(self._last_use[parent])
                heapq.heappush(heap, use * self.num_blocks + parent)
        gone = np.array(victims)
        self._push(gone)
        return self._forget(gone)

    def _oldest_leaves(self, count: int) -> list[int]:
        """Find the leaves that could be evicted first, as a heap.

        Time of use and id are put into one number, which orders as the two do.
        """
        is_leaf = self._is_known & (self._holders == 0) & (self._num_children == 0)
        leaves = np.flatnonzero(is_leaf)
        keys = self._last_use[leaves] * self.num_blocks + leaves
        if count < len(keys):
            keys = np.partition(keys, count - 1)[:count]
        # A sorted list is a heap.
        return np.sort(keys).tolist()

    def _is_bare(self, block: int, num_gone: int) -> bool:
        """Say whether a block is a leaf that nobody holds, once children are gone."""
        return not self._holders[block] and bool(num_gone == self._num_children[block])

    def _forget(self, blocks: np.ndarray) -> list[BlockHash]:
        """Forget the content of cached blocks that nobody holds."""
        self._num_evictable -= len(blocks)
        hashes: list[BlockHash] = self._hashes[blocks].tolist()
        for block_hash in hashes:
            del self._by_hash[block_hash]
        parents = self._parents[blocks]
        np.subtract.at(self._num_children, parents[parents != _NONE], 1)
        self._hashes[blocks] = None
        self._is_known[blocks] = False
        self._parents[blocks] = _NONE
        self._last_use[blocks] = _NONE
        return hashes


def _as_dict(is_entry: np.ndarray, values: np.ndarray) -> dict[int, Any]:
    """Read the entries of an array that stands for a dictionary by block id."""
    keys = np.flatnonzero(is_entry)
    return dict(zip(keys.tolist(), values[keys].tolist(), strict=True))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
