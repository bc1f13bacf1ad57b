"""The block pool: which K/V blocks are free, held by requests, or cached for reuse.

Every block is in exactly one of three states:

* *free*: nobody needs its content;
* *held*: in the block table of one request or more, counted in ``holders``;
* *cached*: held by nobody, but its content is known by its hash.

A held block may have a hash too. Blocks form chains: the *parent* of a cached block
holds the tokens just before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.blocks import BlockHash
from lockstep.config import Eviction
from lockstep.errors import IntegrityError, OutOfBlocksError
from lockstep.state import BlockPoolState


class Allocation(NamedTuple):
    """Blocks that were taken, and the cached content given up for them.

    Attributes:
        block_ids: The blocks, each held once.
        evicted: Hashes whose content is lost.
    """

    block_ids: list[int]
    evicted: list[BlockHash]


class BlockPool:
    """Hands out block ids and remembers what the cached ones contain.

    It knows nothing of tensors. One rule keeps eviction simple: a block is registered
    only on top of a cached block that its own request holds, so whoever holds a block
    holds its cached ancestors as well, and every cached block nobody holds can be
    evicted.
    """

    def __init__(self, num_blocks: int, eviction: Eviction) -> None:
        """Start with every block free.

        Args:
            num_blocks: Blocks in the pool, without the dummy block.
            eviction: ``lru`` keeps released content until room is needed; ``ref_zero``
                forgets it when its last holder lets go.
        """
        self.num_blocks = num_blocks
        self.eviction: Eviction = eviction
        self.reset()

    def reset(self) -> None:
        """Forget everything; every block is free again."""
        self.free = list(reversed(range(self.num_blocks)))
        self.holders = dict.fromkeys(range(self.num_blocks), 0)
        self.hashes: dict[int, BlockHash] = {}
        self.by_hash: dict[BlockHash, int] = {}
        self.parents: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.clock = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be had without giving anything up."""
        return len(self.free)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody holds."""
        return sum(self.holders[block] == 0 for block in self.hashes)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Find the block with this content."""
        return self.by_hash.get(block_hash)

    def match(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Find the cached blocks of a prefix, as far as they go without a gap.

        Args:
            block_hashes: Hashes of the full blocks of a token list, in order.
        """
        found: list[int] = []
        for block_hash in block_hashes:
            block = self.by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold blocks found by `match`, so that nothing evicts them."""
        for block in block_ids:
            self.holders[block] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo `pin`; unlike `release` this does not count as a use."""
        for block in block_ids:
            self.holders[block] -= 1

    def allocate(self, count: int) -> Allocation:
        """Take blocks, evicting cached ones if there are too few free: all or nothing.

        Evicts the least recently used content first, but never a block on top of which
        others are cached: a prefix without its beginning is of no use.

        Raises:
            OutOfBlocksError: Free and evictable blocks together are too few; nothing
                has changed.
        """
        if not count:
            return Allocation([], [])
        if count > self.num_free + self.num_evictable:
            raise OutOfBlocksError(
                f"{count} blocks are needed; {self.num_free} are free and "
                f"{self.num_evictable} more can be evicted, of {self.num_blocks}"
            )
        evicted = [self._evict_one() for _ in range(count - self.num_free)]
        taken = [self.free.pop() for _ in range(count)]
        self.pin(taken)
        return Allocation(taken, evicted)

    def register(
        self, block_id: int, block_hash: BlockHash, parent_id: int | None
    ) -> int:
        """Make a held, fully computed block known by its hash.

        Two requests may compute the same tokens at the same time. The second is given
        the block of the first, which it holds from now on, and its own becomes free:
        the content is the same, and what it computes on top can be found by others.

        Args:
            block_id: The block; its content must have been computed.
            block_hash: Its chained hash.
            parent_id: The block before it in the same table; None for a first block.

        Returns:
            The block to hold: ``block_id``, or another that has the hash already.
        """
        known = self.by_hash.get(block_hash, block_id)
        if known != block_id:
            self.pin([known])
            self.unpin([block_id])
            self.free.append(block_id)
        elif block_id not in self.hashes:
            if parent_id is not None:
                _require(parent_id in self.hashes, f"parent {parent_id} is not cached")
                self.parents[block_id] = parent_id
            self.hashes[block_id] = block_hash
            self.by_hash[block_hash] = block_id
            self.last_use[block_id] = self.clock
        return known

    def release(self, block_ids: Sequence[int]) -> list[BlockHash]:
        """Let go of a block table; content with a hash may stay cached.

        Args:
            block_ids: A request's table, in order. Blocks are let go from the end, so
                that a parent never goes before its child.

        Returns:
            Hashes whose content is lost.
        """
        self.clock += 1
        dropped: list[BlockHash] = []
        for block in reversed(block_ids):
            self.holders[block] -= 1
            if self.holders[block]:
                continue
            if block not in self.hashes:
                self.free.append(block)
            elif self.eviction == "ref_zero":
                dropped.append(self._forget(block))
            else:
                self.last_use[block] = self.clock
        return dropped

    def export_state(self) -> BlockPoolState:
        """Copy the bookkeeping into its plain form."""
        return BlockPoolState(
            free=list(self.free),
            holders={block: count for block, count in self.holders.items() if count},
            hashes=dict(self.hashes),
            parents=dict(self.parents),
            last_use=dict(self.last_use),
            clock=self.clock,
        )

    def import_state(self, state: BlockPoolState) -> None:
        """Take over bookkeeping exported by either side."""
        self.reset()
        self.free = list(state.free)
        self.holders |= state.holders
        self.hashes = dict(state.hashes)
        self.by_hash = {value: block for block, value in state.hashes.items()}
        self.parents = dict(state.parents)
        self.last_use = dict(state.last_use)
        self.clock = state.clock

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Check every invariant against the block tables of all running requests.

        Raises:
            IntegrityError: One does not hold; the message names the blocks.
        """
        held = [block for table in tables for block in table]
        for block in range(self.num_blocks):
            if self.holders[block] != held.count(block):
                raise IntegrityError(
                    f"block {block} counts {self.holders[block]} holders; "
                    f"{held.count(block)} tables contain it"
                )
        for table in tables:
            _require(len(set(table)) == len(table), f"a table repeats a block: {table}")
        cached = {block for block in self.hashes if not self.holders[block]}
        groups = [set(self.free), set(held), cached]
        together = sum(map(len, groups))
        _require(
            together == self.num_blocks == len(set().union(*groups)),
            f"{len(self.free)} free + {len(groups[1])} held + {len(cached)} cached "
            f"blocks are not {self.num_blocks} different ones",
        )
        self._check_chains()

    def _check_chains(self) -> None:
        """Check hashes and parents: every cached prefix has its beginning."""
        _require(
            len(self.by_hash) == len(self.hashes)
            and all(self.by_hash.get(v) == block for block, v in self.hashes.items()),
            "the two hash maps are not inverse to each other",
        )
        _require(
            set(self.last_use) == set(self.hashes),
            "blocks with a hash and blocks with a time of use differ",
        )
        for block, parent in self.parents.items():
            _require(
                block in self.hashes and parent in self.hashes,
                f"block {block} is cached on top of {parent}, which is not",
            )
            _require(
                self.holders[parent] > 0 or self.holders[block] == 0,
                f"block {block} is held, its parent {parent} is not",
            )

    def _evict_one(self) -> BlockHash:
        """Give up the cached block that was let go longest ago among those on top.

        Ties go to the lowest id, so that both sides agree.
        """
        covered = set(self.parents.values())
        leaves = [
            block
            for block in self.hashes
            if self.holders[block] == 0 and block not in covered
        ]
        return self._forget(
            min(leaves, key=lambda block: (self.last_use[block], block))
        )

    def _forget(self, block: int) -> BlockHash:
        """Take a block out of the cache; it is free then."""
        block_hash = self.hashes.pop(block)
        del self.by_hash[block_hash]
        self.parents.pop(block, None)
        del self.last_use[block]
        self.free.append(block)
        return block_hash


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
