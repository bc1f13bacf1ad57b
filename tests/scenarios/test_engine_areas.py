"""The engine area by area: hashes, blocks, savings, counts, order, hybrid rules.

Two worked examples close the file. Both come from an engine that stores states at other
places; where the numbers here are better, a comment says why.
"""

from __future__ import annotations

import hashlib
import random
from array import array

import pytest

from lockstep.blocks import ROOT_HASH, BlockHash, hash_block
from lockstep.errors import OutOfBlocksError
from lockstep.plan import RowKind, SkipLimit
from tests.engines import Run, greedy, make_engine
from tests.scenarios.common import (
    BLOCK,
    ask,
    assert_nothing_held,
    branch,
    drain_equal,
    hash_blocks,
    is_mixed,
    num_computed,
    part,
    reports_of,
    rows_of,
    serve_equal,
    slices_of,
    snapshots_of,
    text,
    tiny,
)

MODULE = "engine"
PADDED = True

MODEL = tiny("M*")
ATTENTION = tiny("*")
FOUR = greedy(4)

# Hashes.


def test_hashes_follow_from_tokens_alone() -> None:
    """The hash is SHA-256 over parent and tokens, spelled out here a second time."""
    tokens = text(2 * BLOCK)
    first = hashlib.sha256(bytes(32) + array("q", tokens[:BLOCK]).tobytes()).digest()
    second = hashlib.sha256(first + array("q", tokens[BLOCK:]).tobytes()).digest()
    assert hash_blocks(tokens) == hash_blocks(list(tokens)) == [first, second]


def test_a_hash_stands_for_everything_before_it() -> None:
    """One token changed in block 0 changes every hash; in the last, the last alone."""
    tokens = text(3 * BLOCK)
    early, late = list(tokens), list(tokens)
    early[3] += 1
    late[-1] += 1
    whole = hash_blocks(tokens)
    assert not set(whole) & set(hash_blocks(early))
    assert [a == b for a, b in zip(whole, hash_blocks(late), strict=True)] == [
        True,
        True,
        False,
    ]


def test_equal_blocks_on_different_parents_differ(side: str) -> None:
    """Block 1 is found only behind the block 0 that it was computed behind."""
    engine = make_engine(MODEL, side)
    common = text(BLOCK, seed=9)
    one, other = text(BLOCK, seed=1) + common, text(BLOCK, seed=2) + common
    assert hash_blocks(one)[1] != hash_blocks(other)[1]
    ask(engine, one + [1])
    assert ask(engine, other + [1]).cache.matched_kv_tokens == 0


def test_tokens_that_collide_in_a_weak_hash_do_not(side: str) -> None:
    """One less here and 31 more there: equal under a polynomial in 31."""
    tokens = [*text(BLOCK - 2), 7, 20]
    shifted = [*tokens[:-2], 7 - 1, 20 + 31]

    def weak(block: list[int]) -> int:
        value = 0
        for token in block:
            value = value * 31 + token
        return value

    assert weak(shifted) == weak(tokens)
    assert hash_block(ROOT_HASH, shifted) != hash_block(ROOT_HASH, tokens)
    engine = make_engine(MODEL, side)
    ask(engine, tokens + [1])
    assert ask(engine, shifted + [1]).cache.matched_kv_tokens == 0


# Registration.


def test_only_full_blocks_are_registered(side: str) -> None:
    """A block is found once it is complete, in prefill or in decode."""
    engine = make_engine(MODEL, side)
    prompt = text(2 * BLOCK + 5)
    outputs, run = serve_equal(engine, [prompt], greedy(13))
    hashes = hash_blocks(prompt + outputs[0].token_ids)
    known = [record.registered_blocks for record in run.records]
    assert known[0] == hashes[:2]
    # The last token drawn is not computed: 37 + 12 tokens complete a third block.
    assert [h for found in known[1:] for h in found] == hashes[2:3]
    assert [len(record.tokens) for record in run.records if record.tokens] == [1] * 13


def test_the_next_slice_completes_a_partial_block(side: str) -> None:
    """A slice that ends inside a block registers it only with the next one."""
    engine = make_engine(MODEL, side, max_tokens_per_step=10)
    prompt = text(20)
    outputs, run = serve_equal(engine, [prompt], FOUR)
    assert slices_of(run, outputs[0].request_id) == [(0, 10), (10, 20)]
    known = [len(record.registered_blocks) for record in run.records]
    assert known == [0, 1, 0, 0, 0]


def test_three_prompts_share_what_they_have_in_common(side: str) -> None:
    """Each finds the blocks of the first up to where it leaves, and then its own."""
    engine = make_engine(MODEL, side)
    base = text(4 * BLOCK)
    tables: list[list[int]] = []
    for length, seed in ((64, 0), (32, 1), (48, 2)):
        outputs, run = serve_equal(
            engine, [branch(base[:length], length + 10, seed)], FOUR
        )
        tables.append(rows_of(run, outputs[0].request_id)[0].block_table)
        matched = outputs[0].cache.matched_kv_tokens
        assert matched == (0 if seed == 0 else length)
    assert tables[1][:2] == tables[0][:2] and tables[1][2] != tables[0][2]
    assert tables[2][:3] == tables[0][:3] and tables[2][3] != tables[0][3]


# Savings.


def test_a_full_match_still_computes_a_token() -> None:
    """Without a state to restore one token is enough."""
    engine = make_engine(ATTENTION)
    prompt = text(3 * BLOCK)
    outputs, run = serve_equal(engine, [prompt], FOUR)
    assert num_computed(run) == 48 + 3
    outputs, run = serve_equal(engine, [prompt], FOUR)
    assert slices_of(run, outputs[0].request_id) == [(47, 48)]
    assert outputs[0].cache.limit is SkipLimit.LAST_TOKEN
    # The shared last block was not written, and decode went to a block of its own.
    table = rows_of(run, outputs[0].request_id)[-1].block_table
    assert rows_of(run, outputs[0].request_id)[-1].num_shared_blocks == 3
    assert len(table) == 4


@pytest.mark.parametrize(
    ("shared", "length", "skipped"), [(0, 40, 0), (20, 40, 0), (32, 40, 32)]
)
def test_computed_and_skipped_tokens_add_up(
    side: str, shared: int, length: int, skipped: int
) -> None:
    """What is reported as skipped is what was not computed."""
    engine = make_engine(MODEL, side)
    base = text(64)
    ask(engine, branch(base[:32], 40, seed=1))
    outputs, run = serve_equal(engine, [branch(base[:shared], length, seed=2)], FOUR)
    assert outputs[0].cache.num_skipped_tokens == skipped
    assert num_computed(run) == length - skipped + 3
    report = reports_of(run, outputs[0].request_id)[0]
    assert report.matched_kv_tokens == shared // BLOCK * BLOCK


# Counts of holders, eviction.


@pytest.mark.parametrize(("eviction", "kept"), [("lru", 32), ("ref_zero", 0)])
def test_what_is_kept_when_nobody_holds_it(side: str, eviction: str, kept: int) -> None:
    """Least-recently-used keeps unheld content; the other policy drops it at once."""
    engine = make_engine(MODEL, side, eviction=eviction)
    prompt = text(40)
    ask(engine, prompt)
    assert_nothing_held(engine)
    assert len(engine.export_state().blocks.hashes) == kept // BLOCK
    assert len(engine.export_state().slots.stored) == kept // 32
    assert ask(engine, prompt).cache.num_skipped_tokens == kept


def test_content_dropped_at_zero_is_shared_until_then(side: str) -> None:
    """Under the policy that drops, a running request's blocks are still found."""
    engine = make_engine(MODEL, side, eviction="ref_zero")
    run = Run()
    engine.add(text(40), greedy(20))
    run.note(engine.step())
    late = engine.add(text(40), FOUR)
    drain_equal(engine, {"request-1": greedy(20), late: FOUR}, run)
    assert run.outputs[late].cache.num_skipped_tokens == 32
    assert not engine.export_state().blocks.hashes


def test_two_holders_that_end_together_let_go_twice(side: str) -> None:
    """Counts fall by two when two requests on the same blocks end in one step."""
    engine = make_engine(MODEL, side)
    stem = text(2 * BLOCK)
    ask(engine, stem + [1])
    names = [engine.add(branch(stem, 40, seed), FOUR) for seed in (1, 2)]
    run = Run()
    run.note(engine.step())
    shared = rows_of(run, names[0])[0].block_table[:2]
    assert rows_of(run, names[1])[0].block_table[:2] == shared
    holders = engine.export_state().blocks.holders
    assert [holders[block] for block in shared] == [2, 2]
    drain_equal(engine, FOUR, run)
    assert {output.request_id for output in run.records[-1].finished} == set(names)
    assert_nothing_held(engine)
    assert not engine.export_state().blocks.holders


def test_a_match_is_pinned_before_anything_is_evicted(side: str) -> None:
    """The block matched is the one that least recently used would give up."""
    engine = make_engine(MODEL, side, num_blocks=5)
    old = text(2 * BLOCK)
    ask(engine, old + [1])
    ask(engine, text(2 * BLOCK, seed=1) + [1])
    outputs, run = serve_equal(engine, [branch(old, 5 * BLOCK - 3, seed=2)], FOUR)
    plan = run.records[0].plan
    assert plan.evicted_blocks == hash_blocks(text(2 * BLOCK, seed=1))[::-1]
    assert outputs[0].cache.num_skipped_tokens == 32
    table = plan.rows[0].block_table
    assert len(set(table)) == len(table) == 5


def test_a_pinned_match_does_not_count_as_room(side: str) -> None:
    """An admission that could only be had by evicting its own match waits."""
    engine = make_engine(MODEL, side, num_blocks=5)
    stem = text(2 * BLOCK)
    ask(engine, stem + [1])
    sampling = {engine.add(text(20, seed=1), greedy(8)): greedy(8)}
    run = Run()
    run.note(engine.step())
    # Three blocks are left, two of them the match; three more are needed.
    waiting = engine.add(branch(stem, 4 * BLOCK + 5, seed=2), FOUR)
    sampling[waiting] = FOUR
    record = run.note(engine.step())
    assert "too few blocks" in record.plan.blocked
    assert not record.plan.evicted_blocks
    assert engine.export_state().blocks.holders.keys() == set(
        record.rows[0].block_table
    )
    drain_equal(engine, sampling, run)
    assert run.outputs[waiting].cache.num_skipped_tokens == 32


def test_decode_evicts_a_cached_block_when_none_is_free(side: str) -> None:
    """A request that crosses into a new block goes on, at the cache's cost."""
    engine = make_engine(MODEL, side, num_blocks=4)
    ask(engine, text(2 * BLOCK, seed=1) + [1])
    outputs, run = serve_equal(engine, [text(30)], greedy(8))
    grown = [r for r in run.records if r.plan.evicted_blocks]
    assert [record.rows[0].kind for record in grown] == [RowKind.DECODE]
    assert grown[0].rows[0].end == 33 and not grown[0].plan.preempted
    assert outputs[0].finish_reason == "length"


def test_a_resumed_request_evicts_a_cached_block(side: str) -> None:
    """Preempted on a full block, it comes back when cached content can go."""
    engine = make_engine(MODEL, side, num_blocks=5)
    first = engine.add(text(30), greedy(20))
    second = engine.add(text(31, seed=1), greedy(20))
    sampling = {first: greedy(20), second: greedy(20)}
    run = drain_equal(engine, sampling)
    preempted = [name for record in run.records for name in record.plan.preempted]
    assert second in preempted and first not in preempted
    back = [r for r in rows_of(run, second) if r.cache is not None][-1]
    record = next(r for r in run.records if back in r.rows)
    assert record.plan.evicted_blocks
    assert_nothing_held(engine)


def test_nobody_is_admitted_in_a_step_that_preempts(side: str) -> None:
    """What a preemption freed is for those that still run, not for the next in line."""
    engine = make_engine(MODEL, side, num_blocks=6)
    sampling = {
        engine.add(text(length, seed), greedy(20)): greedy(20)
        for seed, length in enumerate((31, 31, 17))
    }
    run = drain_equal(engine, sampling)
    preempting = [record for record in run.records if record.plan.preempted]
    assert preempting
    for record in preempting:
        assert all(row.cache is None for row in record.rows)
        assert "preempted" in record.plan.blocked
    assert_nothing_held(engine)


def test_parents_outlive_their_children(side: str) -> None:
    """Under any trace of chains, what is evicted is the end of a chain."""
    source = random.Random(3)
    pool = part(side, "BlockPool")(12, "lru")
    parent_of: dict[BlockHash, BlockHash] = {}
    num_evicted = 0
    for _ in range(300):
        chain = [source.randrange(3) for _ in range(source.randrange(1, 6))]
        hashes = hash_blocks([token for token in chain for _ in range(4)], 4)
        table = pool.match(hashes)
        pool.pin(table)
        try:
            taken = pool.allocate(len(hashes) - len(table))
        except OutOfBlocksError:
            pool.unpin(table)
            continue
        table = table + taken.block_ids
        for index, block_hash in enumerate(hashes):
            parent = table[index - 1] if index else None
            assert pool.register(table[index], block_hash, parent) == table[index]
        pool.check_integrity([table])
        pool.release(table)
        pool.check_integrity([])
        parent_of |= zip(hashes[1:], hashes[:-1], strict=True)
        num_evicted += len(taken.evicted)
        cached = set(pool.export_state().hashes.values())
        assert all(parent_of.get(each, each) in cached for each in cached)
    assert num_evicted > 100 and pool.num_evictable == 12


# Order of work.


def test_identical_prompts_cost_one_prefill(side: str) -> None:
    """All but the first wait one step, then come in their order and match."""
    engine = make_engine(MODEL, side)
    prompt = text(40)
    outputs, run = serve_equal(engine, [prompt] * 4, FOUR)
    names = [output.request_id for output in outputs]
    assert run.records[0].plan.deferred == names[1:]
    admitted = [row.request_id for row in run.records[1].rows if row.cache is not None]
    assert admitted == names[1:]
    assert run.records[1].plan.deferred == []
    assert [output.cache.num_skipped_tokens for output in outputs] == [0, 32, 32, 32]
    assert num_computed(run) == 40 + 3 * 8 + 4 * 3


def test_a_request_waits_no_longer_than_its_prefix_is_computed(side: str) -> None:
    """It is put off while another's prompt goes on, and admitted when that is done."""
    engine = make_engine(MODEL, side, max_tokens_per_step=40)
    donor = text(70)
    first = engine.add(donor, FOUR)
    second = engine.add(branch(donor[:64], 70, seed=1), FOUR)
    other = engine.add(text(5, seed=2), FOUR)
    run = drain_equal(engine, FOUR)
    assert slices_of(run, first) == [(0, 32), (32, 70)]
    # The cut prompt goes first, so nobody is looked at before it is done.
    assert "cut" in run.records[0].plan.blocked
    assert run.records[1].plan.deferred == [second]
    assert rows_of(run, other)[0] in run.records[1].rows
    assert slices_of(run, second) == [(64, 70)]


def test_decode_then_the_cut_prompt_then_the_queue(side: str) -> None:
    """The order of a step is fixed, and at most one prompt is cut."""
    engine = make_engine(MODEL, side, max_tokens_per_step=36)
    run, sampling = Run(), {}
    for length, seed in ((10, 1), (100, 2), (50, 3)):
        sampling[engine.add(text(length, seed), greedy(9))] = greedy(9)
    drain_equal(engine, sampling, run)
    decoding, cut, last = sampling
    assert [(r.request_id, r.start, r.end) for r in run.records[1].rows] == [
        (decoding, 10, 11),
        (cut, 16, 48),
    ]
    shared = [record for record in run.records if len(record.rows) == 3]
    assert [row.request_id for row in shared[0].rows] == [decoding, cut, last]
    for record in run.records:
        ends = {r.request_id: r.end for r in record.plan.prefill_rows}
        assert sum(end < len(text_of(run, name)) for name, end in ends.items()) <= 1


def text_of(run: Run, name: str) -> list[int]:
    """Return a request's prompt."""
    return run.outputs[name].prompt_token_ids


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_fewer_tokens_than_requests(side: str, budget: int) -> None:
    """Any budget is legal; decoding requests take turns."""
    engine = make_engine(MODEL, side, max_tokens_per_step=budget, max_requests=4)
    outputs, run = serve_equal(engine, [text(5, seed) for seed in range(4)], FOUR)
    assert all(record.shape.tokens <= budget for record in run.records)
    assert len(outputs) == 4


# Hybrid rules.


def test_without_slots_memory_is_shared_and_nothing_is_skipped(side: str) -> None:
    """K/V alone saves memory, not work, and says so."""
    engine = make_engine(MODEL, side, snapshot_slots=0)
    ask(engine, text(40))
    outputs, run = serve_equal(engine, [text(40)], FOUR)
    report = outputs[0].cache
    assert (report.matched_kv_tokens, report.num_skipped_tokens) == (32, 0)
    assert report.limit is SkipLimit.NO_STATE
    assert rows_of(run, outputs[0].request_id)[0].num_shared_blocks == 2


def test_a_prompt_that_ends_on_a_block_backs_off(side: str) -> None:
    """One token must be computed, so the state before the last block serves."""
    engine = make_engine(MODEL, side)
    prompt = text(3 * BLOCK)
    outputs, run = serve_equal(engine, [prompt], FOUR)
    assert snapshots_of(run, outputs[0].request_id) == [32, 48]
    outputs, run = serve_equal(engine, [prompt], FOUR)
    assert slices_of(run, outputs[0].request_id) == [(32, 48)]
    assert outputs[0].cache.limit is SkipLimit.LAST_TOKEN


def test_cached_and_fresh_rows_share_a_batch(side: str) -> None:
    """Rows that start from a snapshot, from nothing, and in decode, in one step."""
    engine = make_engine(MODEL, side)
    ask(engine, text(40))
    run = Run()
    engine.add(text(10, seed=5), greedy(6))
    run.note(engine.step())
    hit = engine.add(branch(text(32), 45, seed=1), greedy(6))
    fresh = engine.add(text(20, seed=2), greedy(6))
    record = run.note(engine.step())
    assert is_mixed(record) and record.shape.prefill_requests == 2
    zero = engine.sizes.zero_slot
    sources = {row.request_id: row.initial_slot_id for row in record.plan.prefill_rows}
    assert sources[hit] != zero == sources[fresh]
    drain_equal(engine, greedy(6), run)


@pytest.mark.parametrize(("scan_chunk", "block"), [(16, 32), (32, 32), (16, 48)])
def test_blocks_of_one_scan_chunk_or_several(
    side: str, scan_chunk: int, block: int
) -> None:
    """States stand at block boundaries, whatever a scan chunk is."""
    engine = make_engine(MODEL, side, scan_chunk_size=scan_chunk, block_size=block)
    prompt = text(2 * block + 9)
    outputs, run = serve_equal(engine, [prompt], FOUR)
    assert 2 * block in snapshots_of(run, outputs[0].request_id)
    assert ask(engine, prompt).cache.num_skipped_tokens == 2 * block


def test_snapshots_fill_their_slots_exactly(side: str) -> None:
    """As many states as slots: all are stored, none is lost, the next one evicts."""
    engine = make_engine(MODEL, side, snapshot_slots=3, max_tokens_per_step=128)
    serve_equal(engine, [text(20, seed) for seed in range(3)], FOUR)
    state = engine.export_state().slots
    assert len(state.stored) == 3 and not state.free_snapshots
    _, run = serve_equal(engine, [text(20, seed=3)], FOUR)
    assert [len(record.plan.evicted_states) for record in run.records][0] == 1


def test_more_states_than_slots_in_one_step(side: str) -> None:
    """With every slot taken by this step's own rows, the rest goes without."""
    engine = make_engine(MODEL, side, snapshot_slots=2, max_tokens_per_step=128)
    outputs, run = serve_equal(engine, [text(20, seed) for seed in range(4)], FOUR)
    first = run.records[0]
    assert [len(row.snapshots) for row in first.rows] == [1, 1, 0, 0]
    assert len(first.stored_states) == 2
    hits = [ask(engine, output.prompt_token_ids) for output in outputs[:2]]
    assert [output.cache.num_skipped_tokens for output in hits] == [16, 16]


@pytest.mark.parametrize(("keep", "skipped"), [(True, 32), (False, 0)])
def test_reset_keeps_the_cache_when_told(side: str, keep: bool, skipped: int) -> None:
    """Every request is gone; what was cached stays or goes as asked."""
    engine = make_engine(MODEL, side)
    ask(engine, text(40))
    engine.add(text(40, seed=1), FOUR)
    engine.step()
    engine.add(text(40, seed=2), FOUR)
    engine.reset(keep_cache=keep)
    assert_nothing_held(engine)
    assert ask(engine, text(40)).cache.num_skipped_tokens == skipped


# Worked examples.


def test_five_prompts_along_one_tree(side: str) -> None:
    """A stem, branches of growing depth, and the state that the branch point leaves.

    The source's example has blocks of 256; here they are 32, so 300 tokens are 38, 800
    are 100 and 1,100 are 138. What is skipped, step by step, is the same.
    """
    engine = make_engine(
        MODEL, side, block_size=32, max_tokens_per_step=256, max_requests=8
    )
    trunk = text(96)
    prompts = {
        "r0": branch(trunk[:32], 38, seed=0),
        "r1": [*trunk, *text(4, seed=1)],
        "r2": branch(trunk[:64], 100, seed=2),
        "r4": branch(trunk, 138, seed=4),
    }
    for name, prompt in prompts.items():
        engine.add(prompt, greedy(1), name)
    run = Run()
    for _ in range(3):
        run.note(engine.step())
    assert [record.plan.deferred for record in run.records] == [
        ["r1", "r2", "r4"],
        ["r2", "r4"],
        [],
    ]
    engine.add(branch(trunk[:64], 100, seed=3), greedy(1), "r3")
    drain_equal(engine, greedy(1), run)
    found = {
        name: (slices_of(run, name), snapshots_of(run, name)) for name in run.outputs
    }
    assert found == {
        "r0": ([(0, 38)], [32]),
        "r1": ([(32, 100)], [96]),
        # K/V goes deeper than the states do: this one leaves the state at the branch,
        "r2": ([(32, 100)], [64, 96]),
        "r4": ([(96, 138)], [128]),
        # from which this one starts.
        "r3": ([(64, 100)], [96]),
    }
    # 252 tokens instead of 476; the source computes 2,008 of 3,800, the same share.
    assert num_computed(run) == 38 + 68 + 68 + 42 + 36


EDGE_CASES = {
    # name: (prompts served in order, slices and snapshots of the last)
    "a prompt of one block": ([(32, 32)], [(0, 32)], [32]),
    "one block again": ([(32, 32)] * 2, [(0, 32)], []),
    "a little more than a block": ([(38, 38)], [(0, 38)], [32]),
    "two blocks and a half": ([(75, 75)], [(0, 75)], [64]),
    # The source skips nothing here and leaves nothing behind either. Here the boundary
    # before the last is stored on the way,
    "exactly the blocks of a longer one": ([(75, 75), (64, 64)], [(0, 64)], [32]),
    # so that the third time half is skipped.
    "the same once more": ([(75, 75), (64, 64), (64, 64)], [(32, 64)], []),
    # One token left to compute is enough here; the source asks for two, finds no state
    # one block earlier and starts from zeros.
    "one token more than those blocks": ([(75, 75), (65, 65)], [(64, 65)], []),
    "K/V deeper than the states": (
        [(38, 38), (100, 96), (100, 64)],
        [(32, 100)],
        [64, 96],
    ),
}


@pytest.mark.parametrize("case", EDGE_CASES)
def test_edges_of_prompts_and_blocks(side: str, case: str) -> None:
    """Prompts given as (length, tokens in common with the trunk), blocks of 32."""
    prompts, slices, snapshots = EDGE_CASES[case]
    engine = make_engine(MODEL, side, block_size=32, max_tokens_per_step=256)
    trunk = text(100)
    served = [
        serve_equal(engine, [branch(trunk[:common], length, seed)], greedy(1))
        for seed, (length, common) in enumerate(prompts)
    ]
    outputs, run = served[-1]
    name = outputs[0].request_id
    assert slices_of(run, name) == slices
    assert snapshots_of(run, name) == snapshots
