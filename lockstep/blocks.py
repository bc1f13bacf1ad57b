"""Block arithmetic and the chained hashes that name a prefix.

A *block* is ``block_size`` consecutive token positions. The hash of block ``k`` is
taken over the hash of block ``k - 1`` and the tokens of block ``k``, so that one hash
stands for the whole prefix up to the end of its block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

#: A 32-byte SHA-256 digest that names a prefix of whole blocks.
BlockHash = NewType("BlockHash", bytes)

#: Parent of every first block.
ROOT_HASH = BlockHash(bytes(32))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Count the blocks that hold ``num_tokens`` tokens.

    >>> num_blocks_for(0, 16), num_blocks_for(16, 16), num_blocks_for(17, 16)
    (0, 1, 2)
    """
    return -(-num_tokens // block_size)


def align_down(position: int, block_size: int) -> int:
    """Return the last block boundary at or before ``position``.

    >>> align_down(31, 16), align_down(32, 16)
    (16, 32)
    """
    return position // block_size * block_size


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash one full block onto the hash of the block before it.

    Each token enters as eight bytes, so no two token lists share an encoding, and the
    parent enters as its whole digest, so that chaining loses nothing. A weak hash here
    would hand one user's cache to another.
    """
    return BlockHash(hashlib.sha256(parent + array("q", token_ids).tobytes()).digest())


def extend_hashes(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int
) -> None:
    """Append to ``hashes`` those of all blocks that ``token_ids`` completes.

    Args:
        hashes: One hash for each block hashed so far; written.
        token_ids: All tokens of the request from position 0.
        block_size: Tokens in a block.
    """
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else ROOT_HASH
        block = token_ids[index * block_size : (index + 1) * block_size]
        hashes.append(hash_block(parent, block))
