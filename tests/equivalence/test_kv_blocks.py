"""The block pool against its twin: same ids, same evictions, after any operations."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.blocks import BlockHash, extend_hashes
from lockstep.errors import IntegrityError, OutOfBlocksError
from lockstep.state import BlockPoolState
from tests.conftest import SIDES
from tests.factories import load

POLICIES = ("lru", "ref_zero")
NUM_BLOCKS = 9


class Tables:
    """Block tables of requests over one pool, used by the rules of its callers.

    Every method returns what the pool answered.
    """

    def __init__(self, side: str, eviction: str, num_blocks: int = NUM_BLOCKS) -> None:
        """Start without requests."""
        self.pool: Any = load(side, "kv_blocks").BlockPool(num_blocks, eviction)
        self.tables: list[list[int]] = []
        self.hashes: list[list[BlockHash]] = []

    def admit(self, names: list[int]) -> object:
        """Pin what is cached, take the rest; names are tokens, one a block."""
        hashes: list[BlockHash] = []
        extend_hashes(hashes, names, 1)
        match = self.pool.match(hashes)
        self.pool.pin(match)
        try:
            # One block more than there are hashes: the last is not full.
            taken = self.pool.allocate(len(names) + 1 - len(match))
        except OutOfBlocksError as error:
            self.pool.unpin(match)
            return str(error)
        self.tables.append(match + taken.block_ids)
        self.hashes.append(hashes)
        return tuple(taken)

    def register(self, index: int, count: int) -> object:
        """Register the first blocks of a table; known ones replace copies."""
        if not self.tables:
            return None
        index %= len(self.tables)
        table = self.tables[index]
        for block, block_hash in list(enumerate(self.hashes[index]))[:count]:
            parent = table[block - 1] if block else None
            table[block] = self.pool.register(table[block], block_hash, parent)
        return list(table)

    def grow(self, index: int, count: int) -> object:
        """Take blocks for a table."""
        try:
            taken = self.pool.allocate(count)
        except OutOfBlocksError as error:
            return str(error)
        if not self.tables:
            return self.pool.release(taken.block_ids)
        self.tables[index % len(self.tables)] += taken.block_ids
        return tuple(taken)

    def release(self, index: int, count: int) -> object:
        """Let go of one or more tables in one call; they may share blocks."""
        if not self.tables:
            return None
        first = index % len(self.tables)
        gone = self.tables[first : first + count]
        del self.tables[first : first + count], self.hashes[first : first + count]
        return self.pool.release([block for table in gone for block in table])

    def reset(self) -> object:
        """Forget everything."""
        self.pool.reset()
        self.tables, self.hashes = [], []
        return None


SMALL = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.integers(0, 1), max_size=5)),
    st.tuples(st.just("register"), SMALL, st.integers(0, 5)),
    st.tuples(st.just("grow"), SMALL, st.integers(0, 2)),
    st.tuples(st.just("release"), SMALL, st.integers(1, 3)),
)
TRACES = st.lists(OPERATIONS, min_size=1, max_size=40)


def assert_twins(sides: list[Tables]) -> None:
    """Check that two pools are sound and equal in all that can be seen."""
    first, second = sides
    assert first.pool.export_state() == second.pool.export_state()
    assert first.pool.num_free == second.pool.num_free
    assert first.pool.num_evictable == second.pool.num_evictable
    for side in sides:
        side.pool.check_integrity(side.tables)


@pytest.mark.parametrize("eviction", POLICIES)
@given(trace=TRACES, is_reset=st.booleans())
def test_any_operations(
    eviction: str, trace: list[tuple[Any, ...]], is_reset: bool
) -> None:
    """Twins answer alike, whatever is asked, and stay equal."""
    sides = [Tables(side, eviction) for side in SIDES]
    for operation, *arguments in trace:
        answers = [getattr(side, operation)(*arguments) for side in sides]
        assert answers[0] == answers[1], operation
        assert_twins(sides)
    if is_reset:
        for side in sides:
            side.reset()
        assert_twins(sides)


@pytest.mark.parametrize("eviction", POLICIES)
@given(before=TRACES, after=TRACES, swap=st.booleans())
def test_either_side_takes_over(
    eviction: str, before: list[tuple[Any, ...]], after: list[Any], swap: bool
) -> None:
    """A pool that took over the other's state goes on as that does."""
    source, heir = [Tables(side, eviction) for side in SIDES[:: -1 if swap else 1]]
    for operation, *arguments in before:
        getattr(source, operation)(*arguments)
    heir.pool.import_state(source.pool.export_state())
    heir.tables = [list(table) for table in source.tables]
    heir.hashes = [list(hashes) for hashes in source.hashes]
    assert_twins([source, heir])
    for operation, *arguments in after:
        answers = [getattr(side, operation)(*arguments) for side in (source, heir)]
        assert answers[0] == answers[1], operation
    assert_twins([source, heir])


@given(
    parents=st.lists(st.integers(-1, 30), min_size=1, max_size=30),
    uses=st.lists(st.integers(0, 4), min_size=30, max_size=30),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
def test_evictions_from_any_forest(
    parents: list[int], uses: list[int], counts: list[int]
) -> None:
    """Whatever was used when, both give up the same content in the same order."""
    size = len(parents)
    pools = [load(side, "kv_blocks").BlockPool(size, "lru") for side in SIDES]
    state = pools[0].export_state()
    state.free = []
    state.hashes = {block: BlockHash(bytes([block]) * 32) for block in range(size)}
    # A parent has a smaller id, so that there are no circles.
    state.parents = {b: p % b for b, p in enumerate(parents) if b and p >= 0}
    state.last_use = dict(enumerate(uses[:size]))
    state.clock = 5
    for pool in pools:
        pool.import_state(state)
    for count in counts:
        if count > pools[0].num_free + pools[0].num_evictable:
            break
        first, second = [pool.allocate(count) for pool in pools]
        assert tuple(first) == tuple(second)
    assert pools[0].export_state() == pools[1].export_state()


@pytest.mark.parametrize("count", [0, 1, 2, NUM_BLOCKS - 1, NUM_BLOCKS, NUM_BLOCKS + 1])
def test_edge_counts(count: int) -> None:
    """None, one, all but one, all, and one too many."""
    sides = [Tables(side, "lru") for side in SIDES]
    for side in sides:
        side.admit([1, 1, 0])
        side.register(0, 3)
        side.release(0, 1)
    answers = [side.grow(0, count) for side in sides]
    assert answers[0] == answers[1]
    assert sides[0].pool.export_state() == sides[1].pool.export_state()


@pytest.mark.parametrize(
    ("counter", "message"),
    [
        ("_num_children", "^children are not counted right$"),
        ("_num_evictable", "^1 blocks are counted as evictable; 0 are$"),
    ],
)
def test_integrity_sees_wrong_counts(counter: str, message: str) -> None:
    """What only the optimized side counts is checked too."""
    side = Tables("optimized", "lru")
    side.admit([1, 0])
    side.register(0, 2)
    side.pool.check_integrity(side.tables)
    setattr(side.pool, counter, getattr(side.pool, counter) + 1)
    with pytest.raises(IntegrityError, match=message):
        side.pool.check_integrity(side.tables)


def test_evictions_from_a_large_forest() -> None:
    """Of many leaves, the oldest go first, however many at once."""
    source, size = random.Random(0), 3000
    pools = [load(side, "kv_blocks").BlockPool(size, "lru") for side in SIDES]
    state = pools[0].export_state()
    state.free = []
    state.hashes = {b: BlockHash(b.to_bytes(2, "big") * 16) for b in range(size)}
    state.parents = {b: source.randrange(b) for b in range(size // 2, size)}
    state.last_use = {block: source.randrange(9000) for block in range(size)}
    state.clock = 9000
    for pool in pools:
        pool.import_state(state)
    for count in (1, 2, 3, 30, 60, 7, 1, 90):
        first, second = [pool.allocate(count) for pool in pools]
        assert tuple(first) == tuple(second)


def lose_time_of_use(state: BlockPoolState, tables: list[list[int]]) -> None:
    """A cached block was never let go."""
    state.last_use.pop(next(iter(state.hashes)))


def cache_twice(state: BlockPoolState, tables: list[list[int]]) -> None:
    """Two blocks hold the same content."""
    first, second, *_ = state.hashes
    state.hashes[second] = state.hashes[first]


def lose_parent(state: BlockPoolState, tables: list[list[int]]) -> None:
    """A block is cached on top of one that is not."""
    child, parent = next(iter(state.parents.items()))
    for entries in (state.hashes, state.last_use):
        del entries[parent]
    state.parents = {child: parent}


def hold_child_alone(state: BlockPoolState, tables: list[list[int]]) -> None:
    """A block is held, and what it continues is not."""
    child = list(state.parents)[-1]
    state.holders = {child: 1}
    tables[:] = [[child]]
    state.free = [
        block
        for block in range(NUM_BLOCKS)
        if block not in state.hashes and block != child
    ]


def miscount(state: BlockPoolState, tables: list[list[int]]) -> None:
    """A block counts a holder too many."""
    state.holders[tables[0][1]] += 1


def repeat(state: BlockPoolState, tables: list[list[int]]) -> None:
    """A table names a block twice."""
    tables[0].append(tables[0][0])
    state.holders[tables[0][0]] += 1


def free_held(state: BlockPoolState, tables: list[list[int]]) -> None:
    """A held block is free as well."""
    state.free[0] = tables[0][0]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lose_time_of_use, "blocks with a hash and blocks with a time of use differ"),
        (cache_twice, "the two hash maps are not inverse to each other"),
        (lose_parent, r"block \d is cached on top of \d, which is not"),
        (hold_child_alone, r"is held, its parent \d is not"),
        (miscount, r"counts \d holders; \d tables contain it"),
        (repeat, r"a table repeats a block: \[.*\]"),
        (free_held, r"\d free \+ \d held \+ \d cached blocks are not 9 different ones"),
    ],
)
def test_both_say_the_same_of_broken_books(corrupt: Any, message: str) -> None:
    """Word for word."""
    source = Tables("reference", "lru")
    source.admit([1, 1, 0])
    source.register(0, 3)
    source.admit([1, 0])
    source.register(1, 2)
    said: list[str] = []
    for side in SIDES:
        heir = Tables(side, "lru")
        state = copy.deepcopy(source.pool.export_state())
        tables = copy.deepcopy(source.tables)
        corrupt(state, tables)
        heir.pool.import_state(state)
        with pytest.raises(IntegrityError, match=rf"{message}$") as caught:
            heir.pool.check_integrity(tables)
        said.append(str(caught.value))
    assert said[0] == said[1]
