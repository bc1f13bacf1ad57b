"""The block pool: blocks are shared, kept and given up by rule, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.blocks import ROOT_HASH, BlockHash, hash_block
from lockstep.errors import IntegrityError, OutOfBlocksError
from lockstep.state import BlockPoolState
from tests.factories import load

POLICIES = ("lru", "ref_zero")


def make_pool(side: str, num_blocks: int = 8, eviction: str = "lru") -> Any:
    """Make an empty pool."""
    return load(side, "kv_blocks").BlockPool(num_blocks, eviction)


def chain(*names: int) -> list[BlockHash]:
    """Hash blocks onto each other, one token each."""
    hashes: list[BlockHash] = []
    for name in names:
        hashes.append(hash_block(hashes[-1] if hashes else ROOT_HASH, [name]))
    return hashes


def store(pool: Any, *names: int) -> list[int]:
    """Take a table of blocks and register all; blocks that are cached are shared."""
    hashes = chain(*names)
    table = pool.match(hashes)
    known = len(table)
    pool.pin(table)
    table = table + pool.allocate(len(names) - known).block_ids
    for index in range(known, len(names)):
        parent = table[index - 1] if index else None
        assert pool.register(table[index], hashes[index], parent) == table[index]
    return table


def content(pool: Any) -> set[BlockHash]:
    """List what is cached."""
    return set(pool.export_state().hashes.values())


def test_a_new_pool_is_free(side: str) -> None:
    """Every block can be had, each once, and then none."""
    pool = make_pool(side)
    assert (pool.num_free, pool.num_evictable) == (8, 0)
    taken = pool.allocate(5).block_ids + pool.allocate(0).block_ids
    taken += pool.allocate(3).block_ids
    assert sorted(taken) == list(range(8))
    assert pool.num_free == 0
    pool.check_integrity([taken])


@pytest.mark.parametrize("eviction", POLICIES)
def test_ids_are_unique_after_reset(side: str, eviction: str) -> None:
    """A reset gives back every block, and forgets what they held."""
    pool = make_pool(side, 4, eviction)
    store(pool, 1, 2, 3)
    pool.release(store(pool, 1, 9))
    pool.reset()
    assert pool.match(chain(1, 2, 3)) == []
    assert sorted(pool.allocate(4).block_ids) == [0, 1, 2, 3]


def test_match_ends_at_the_first_gap(side: str) -> None:
    """Blocks behind one that is not cached are of no use."""
    pool = make_pool(side)
    table = store(pool, 1, 2, 3)
    hashes = chain(1, 2, 3)
    assert pool.match(hashes) == table
    assert pool.match(chain(1, 2, 7, 8)) == table[:2]
    assert pool.match([hashes[0], chain(5)[0], hashes[2]]) == table[:1]
    assert pool.match(chain(7)) == pool.match([]) == []


def test_lookup_finds_one_block(side: str) -> None:
    """A hash names one block, or none."""
    pool = make_pool(side)
    table = store(pool, 1, 2)
    assert [pool.lookup(key) for key in chain(1, 2, 3)] == [*table, None]


def test_hashes_stand_for_whole_prefixes(side: str) -> None:
    """The same tokens after another beginning are another block."""
    pool = make_pool(side)
    first, second = store(pool, 1, 2), store(pool, 3, 2)
    assert not set(first) & set(second)
    # A sum over powers of 31 would not tell these apart.
    pool.release(first + store(pool, 10, 40))
    assert pool.match([hash_block(ROOT_HASH, [10 + 1, 40 - 31])]) == []


@pytest.mark.parametrize("count", [3, 7])
def test_allocation_is_all_or_nothing(side: str, count: int) -> None:
    """What cannot be had whole changes nothing, and says the numbers."""
    pool = make_pool(side, 6)
    pool.release(store(pool, 1))
    held = store(pool, 2, 3, 4) + pool.allocate(1).block_ids
    before = pool.export_state()
    with pytest.raises(OutOfBlocksError, match=f"{count} .* 1 are free and 1 more"):
        pool.allocate(count)
    assert pool.export_state() == before
    pool.check_integrity([held])


def test_lru_keeps_what_nobody_holds(side: str) -> None:
    """Content outlives its last holder, until room is needed."""
    pool = make_pool(side, 4)
    table = store(pool, 1, 2)
    assert pool.release(table) == []
    assert (pool.num_free, pool.num_evictable) == (2, 2)
    assert pool.match(chain(1, 2)) == table
    allocation = pool.allocate(3)
    assert allocation.evicted == chain(1, 2)[1:]
    assert pool.match(chain(1, 2)) == table[:1]


def test_ref_zero_drops_what_nobody_holds(side: str) -> None:
    """Content goes with its last holder, the end of the chain first."""
    pool = make_pool(side, 4, "ref_zero")
    first, second = store(pool, 1, 2), store(pool, 1, 3)
    assert pool.release(first) == chain(1, 2)[1:]
    assert pool.match(chain(1, 2)) == first[:1]
    assert pool.release(second) == chain(1, 3)[::-1]
    assert (pool.num_free, pool.num_evictable) == (4, 0)
    pool.check_integrity([])


@pytest.mark.parametrize("eviction", POLICIES)
def test_blocks_without_hash_are_free_at_once(side: str, eviction: str) -> None:
    """Nobody could find their content again; the last one let go is taken next."""
    pool = make_pool(side, 4, eviction)
    table = pool.allocate(3).block_ids
    assert pool.release(table) == []
    assert (pool.num_free, pool.num_evictable) == (4, 0)
    assert pool.allocate(3).block_ids == table


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_block_named_twice_is_let_go_twice(side: str, eviction: str) -> None:
    """Two tables that share a prefix can be released together."""
    pool = make_pool(side, 4, eviction)
    first, second = store(pool, 1, 2), store(pool, 1, 3)
    assert first[0] == second[0]
    pool.check_integrity([first, second])
    pool.release(first + second)
    pool.check_integrity([])
    assert pool.num_free + pool.num_evictable == 4


def test_pins_are_counted(side: str) -> None:
    """A block that was pinned twice, in one call or two, must be let go twice."""
    pool = make_pool(side, 2)
    (block,) = store(pool, 1)
    pool.release([block])
    pool.pin([block, block])
    pool.unpin([block])
    assert pool.num_evictable == 0
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    pool.unpin([block])
    assert pool.allocate(2).evicted == chain(1)


def test_pinned_blocks_are_not_evicted(side: str) -> None:
    """A match that was pinned survives the allocation that follows it."""
    pool = make_pool(side, 4)
    old = store(pool, 1, 2)
    pool.release(old)
    pool.release(store(pool, 3, 4))
    match = pool.match(chain(1, 2, 5, 6))
    pool.pin(match)
    allocation = pool.allocate(2)
    assert allocation.evicted == chain(3, 4)[::-1]
    pool.check_integrity([match + allocation.block_ids])
    assert pool.match(chain(1, 2)) == old


def test_unpinning_is_no_use(side: str) -> None:
    """An admission that failed leaves the order of eviction as it was."""
    pool = make_pool(side, 2)
    first, second = store(pool, 1), store(pool, 2)
    pool.release(first)
    pool.release(second)
    pool.pin(first)
    pool.unpin(first)
    assert pool.allocate(1).evicted == chain(1)


def test_release_is_a_use(side: str) -> None:
    """The content let go last stays longest."""
    pool = make_pool(side, 2)
    first, second = store(pool, 1), store(pool, 2)
    pool.release(first)
    pool.release(second)
    pool.release(store(pool, 1))
    assert pool.allocate(1).evicted == chain(2)


def test_registration_happens_once(side: str) -> None:
    """A block that is known stays so."""
    pool = make_pool(side)
    table = store(pool, 1, 2)
    before = pool.export_state()
    assert pool.register(table[1], chain(1, 2)[1], table[0]) == table[1]
    assert pool.export_state() == before


def test_a_copy_gives_way_to_what_is_known(side: str) -> None:
    """Who computed the same content holds the known block; the copy is free again."""
    pool = make_pool(side)
    table = store(pool, 1, 2)
    (copy,) = pool.allocate(1).block_ids
    free = pool.num_free
    assert pool.register(copy, chain(1)[0], None) == table[0]
    assert pool.num_free == free + 1
    pool.check_integrity([table, [table[0]]])
    pool.release(table)
    assert pool.lookup(chain(1)[0]) == table[0]
    pool.check_integrity([[table[0]]])


def test_registration_needs_a_known_parent(side: str) -> None:
    """On a block that nobody can find, nothing can be found either."""
    pool = make_pool(side)
    table = pool.allocate(2).block_ids
    before = pool.export_state()
    with pytest.raises(IntegrityError, match="not cached"):
        pool.register(table[1], chain(1, 2)[1], table[0])
    assert pool.export_state() == before


#: A(1) -> B(2) -> {C(5), F(3)} and A -> D(3) -> E(5), times of use in brackets.
A, B, C, D, E, F = range(6)
TREE = BlockPoolState(
    free=[],
    hashes={block: BlockHash(bytes([block]) * 32) for block in range(6)},
    parents={B: A, C: B, F: B, D: A, E: D},
    last_use={A: 1, B: 2, C: 5, F: 3, D: 3, E: 5},
    clock=5,
)


def test_leaves_go_first(side: str) -> None:
    """The oldest leaf goes, then what that makes a leaf; a parent never before."""
    pool = make_pool(side, 6)
    pool.import_state(TREE)
    pool.check_integrity([])
    allocation = pool.allocate(3)
    assert allocation.evicted == [TREE.hashes[block] for block in (F, C, B)]
    assert content(pool) == {TREE.hashes[block] for block in (A, D, E)}
    assert sorted(allocation.block_ids) == [B, C, F]


@pytest.mark.parametrize("count", range(1, 7))
def test_evicting_at_once_is_evicting_one_by_one(side: str, count: int) -> None:
    """Several blocks go in the order in which they would go alone."""
    together, apart = make_pool(side, 6), make_pool(side, 6)
    for pool in (together, apart):
        pool.import_state(TREE)
    singles = [key for _ in range(count) for key in apart.allocate(1).evicted]
    assert together.allocate(count).evicted == singles


@pytest.mark.parametrize("eviction", POLICIES)
@given(tables=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8))
def test_parents_outlive_children(
    side: str, eviction: str, tables: list[list[int]]
) -> None:
    """Whatever is cached can be reached from its beginning, however tight the pool."""
    pool = make_pool(side, 7, eviction)
    seen: set[BlockHash] = set()
    for names in tables:
        pool.release(store(pool, *names))
        pool.check_integrity([])
        seen |= set(chain(*names))
        state = pool.export_state()
        assert set(state.hashes.values()) <= seen
        assert set(state.parents) | set(state.parents.values()) <= set(state.hashes)
        assert pool.num_evictable == len(state.hashes)
        assert pool.num_free == 7 - len(state.hashes)


def test_hashes_are_kept_to_the_last_byte(side: str) -> None:
    """A digest may end in zeros."""
    pool, key = make_pool(side, 2), BlockHash(bytes([7]) + bytes(31))
    (block,) = pool.allocate(1).block_ids
    pool.register(block, key, None)
    copy = make_pool(side, 2)
    copy.import_state(pool.export_state())
    copy.release([block])
    assert copy.allocate(2).evicted == [key]


# Integrity: every check can fail.

Corruption = Callable[[BlockPoolState], object]


def sound_state() -> tuple[BlockPoolState, list[list[int]]]:
    """Return a pool of six: 0 -> 1 held with 2, 3 -> 4 cached, 5 free."""
    hashes = dict(zip([0, 1], chain(1, 2), strict=True))
    hashes |= dict(zip([3, 4], chain(3, 4), strict=True))
    state = BlockPoolState(
        free=[5],
        holders={0: 1, 1: 1, 2: 1},
        hashes=hashes,
        parents={1: 0, 4: 3},
        last_use=dict.fromkeys(hashes, 1),
        clock=1,
    )
    return state, [[0, 1, 2]]


def corruptions() -> Iterator[tuple[str, Corruption]]:
    """List a way to make each check fail, with part of its message."""
    yield "block 2 counts 2 holders; 1 tables", lambda s: s.holders.update({2: 2})
    yield "block 5 counts 1 holders; 0 tables", lambda s: s.holders.update({5: 1})
    yield "are not 6 different ones", lambda s: s.free.clear()
    yield "are not 6 different ones", lambda s: s.free.append(3)
    yield "are not 6 different ones", lambda s: s.free.append(2)
    yield "time of use", lambda s: s.last_use.pop(3)
    yield "time of use", lambda s: s.last_use.update({2: 1})
    yield "block 0 is cached on top of 2, which", lambda s: s.parents.update({0: 2})
    yield "block 2 is cached on top of 0, which", lambda s: s.parents.update({2: 0})
    yield "block 1 is held, its parent 3 is not", lambda s: s.parents.update({1: 3})


@pytest.mark.parametrize(("message", "corrupt"), list(corruptions()))
def test_integrity_sees(side: str, message: str, corrupt: Corruption) -> None:
    """A pool that was damaged is found out."""
    state, tables = sound_state()
    pool = make_pool(side, 6)
    pool.import_state(state)
    pool.check_integrity(tables)
    corrupt(state)
    pool.import_state(state)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity(tables)


@pytest.mark.parametrize("lost", [True, False])
def test_integrity_sees_maps_that_differ(side: str, lost: bool) -> None:
    """What a block contains and where content is must agree, both ways."""
    state, tables = sound_state()
    pool = make_pool(side, 6)
    pool.import_state(state)
    by_hash = pool.by_hash if side == "reference" else pool._by_hash
    if lost:
        by_hash.popitem()
    else:
        by_hash[chain(7)[0]] = 0
    with pytest.raises(IntegrityError, match="the two hash maps"):
        pool.check_integrity(tables)


def test_integrity_sees_a_block_twice_in_a_table(side: str) -> None:
    """Two positions of a request never share a block."""
    state, _ = sound_state()
    state.holders[2] = 2
    pool = make_pool(side, 6)
    pool.import_state(state)
    with pytest.raises(IntegrityError, match="a table repeats a block"):
        pool.check_integrity([[0, 1, 2, 2]])


def test_import_copies(side: str) -> None:
    """Two pools with one origin go their own ways."""
    state, tables = sound_state()
    pool = make_pool(side, 6)
    pool.import_state(state)
    exported = pool.export_state()
    pool.release(tables[0])
    pool.allocate(3)
    assert state == exported == sound_state()[0]


def test_import_forgets(side: str) -> None:
    """What was held or cached before is gone."""
    state, tables = sound_state()
    pool = make_pool(side, 6)
    store(pool, 7, 8, 9, 10, 11, 12)
    pool.import_state(state)
    pool.check_integrity(tables)
    assert pool.match(chain(7)) == []
