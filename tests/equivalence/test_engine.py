"""Both engines, whole: the same work, compared step by step and position by position.

The reference plays first. The optimized engine then gets the same requests and, step by
step, the reference's tokens, so that one token that might as well have been another
does not end the comparison; what it would have drawn is compared all the same. Its own
plans must be the reference's; at padded shapes it is then given the recorded plans too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import combinations
from typing import Any

import pytest
import torch

from lockstep.errors import IntegrityError
from lockstep.memory import Caches
from lockstep.plan import BatchShape
from lockstep.trace import StepRecord
from tests import tolerances
from tests.engines import greedy
from tests.following import (
    Ties,
    Twin,
    follow,
    twin_of,
    warm_twin,
)
from tests.matrix import (
    ALL,
    AXES,
    BLOCK,
    DEVICE,
    GRAPHS,
    LARGEST,
    MODELS,
    SCAN_CHUNK,
    SHORT_MODELS,
    Row,
    all_rows,
    cover,
    expected_events,
    fetch_packed,
    options,
    recorded,
    seen_events,
    shard,
)
from tests.soaking import assert_passes_equal
from tests.tolerances import assert_equal

Note = Callable[[str, object], None]
Part = Callable[..., Any]

#: ``SHARD=0/8 python -m pytest tests/equivalence/test_engine.py -k row`` runs an eighth
#: of the whole matrix instead of its cover, and ``SHARD=triples`` a cover of triples;
#: `scripts/gpu_matrix.py` does that on a GPU. Engines are then resized for each row,
#: not built.
SHARD = os.environ.get("SHARD", "")
SHORT_CASES = (
    ("warm", ALL, "decode", False),
    ("second turn", SCAN_CHUNK + 1, "mixed", True),
)
if "/" in SHARD:
    ROWS = shard(all_rows(), SHARD)
    SHORT_ROWS = shard(all_rows(tuple(SHORT_MODELS)), SHARD)
else:
    ROWS = cover(3 if SHARD == "triples" else 2)
    SHORT_ROWS = [
        Row(model, *case, graphs)
        for model in SHORT_MODELS
        for case in SHORT_CASES
        for graphs in GRAPHS
    ]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row: Row, record_property: Note) -> None:
    """In float32: a row of the matrix, which must show what it is about."""
    hold_together(row, record_property)


@pytest.mark.parametrize("row", SHORT_ROWS, ids=str)
def test_row_of_short_numbers(row: Row, record_property: Note) -> None:
    """In bfloat16, in a class of its own."""
    hold_together(row, record_property)


def hold_together(row: Row, note: Note, is_warm: bool = bool(SHARD)) -> None:
    """Play a row on both sides; on a warm engine with more room, or on one for it."""
    recording = recorded(replace(row, graphs="off"))
    missing = expected_events(row) - seen_events(row, recording)
    assert not missing, f"never seen: {sorted(missing)}"
    sizes = options(row)
    if is_warm:
        twin = warm_twin(row.config, row.graphs)
        twin.resize(**sizes)
    else:
        twin = twin_of(row.config, row.graphs, tuple(sizes.items()))
    ties, steps = Ties(), 0
    # Once is enough for what graphs have no part in.
    for planned in (False, True) if row.graphs == GRAPHS[-1] else (False,):
        records = follow(recording, twin, ties, planned)
        steps += assert_run_as_asked(row, records, twin)
    note(f"steps of {row.graphs}", steps)
    ties.report(note, row.config.dtype)


def assert_run_as_asked(row: Row, records: list[StepRecord], twin: Twin) -> int:
    """Check that every step ran in the way of the row, and some at another size.

    Returns:
        The number of steps.
    """
    records = [record for record in records if record.rows]
    mode = {"off": "eager", "padded": "padded", "all": "graph"}[row.graphs]
    assert {record.mode for record in records} == {mode}
    is_padded = [record.padded_shape != record.shape for record in records]
    # An engine built for steps of one token has a shape that each of them fills.
    fills = row.budget == 1 and BatchShape(1, 1, 0) in twin.engine.sizes.graph_shapes
    assert any(is_padded) == (row.graphs != "off" and not fills)
    return len(records)


def test_every_pass_equals_the_first(record_property: Note) -> None:
    """Fifty prompts, five times on one warm engine at padded shapes."""
    assert_passes_equal(MODELS["moe"], "padded", DEVICE, record_property)


# That the tests above can fail.


@pytest.mark.parametrize(("strength", "share"), [(2, 0.05), (3, 0.25)])
def test_a_cover_has_every_meeting(strength: int, share: float) -> None:
    """Any two, or three, values that meet in some row meet in one that is run."""
    found = [
        {met for row in rows for met in combinations(astuple(row), strength)}
        for rows in (all_rows(), cover(strength))
    ]
    assert found[0] == found[1]
    assert len(cover(strength)) < share * len(all_rows())


def test_shards_are_all_and_leave_a_row_whole() -> None:
    """Each row is in one shard; where its ways to run are parted, a neighbour is."""
    whole = all_rows()
    assert [row for i in range(7) for row in shard(whole, f"{i}/7")] == whole


def test_what_comes_in_one_transfer_is_what_was_sent() -> None:
    """Values of any dtype and shape, empty ones and views too, bit for bit."""
    sent = [
        torch.tensor([True, False, True]),
        torch.arange(5),
        torch.empty(2, 0, 3),
        torch.full((3, 2), torch.nan, dtype=torch.bfloat16),
        torch.arange(12, dtype=torch.float64).view(3, 4).T,
        torch.arange(7.0)[1:].view(3, 2),
    ]
    for mine, theirs in zip(fetch_packed(sent), sent, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.parametrize(
    ("pool", "index", "message"),
    [
        (0, (0, 0, 31), "wrote blocks"),
        (2, (0, 9), "wrote states"),
        (1, (0, 11), "wrote the zero slot"),
    ],
)
def test_a_write_to_what_nobody_owns_is_seen(
    pool: int, index: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block or state that is free, or the state that all requests start from."""
    twin = warm_twin(MODELS["hybrid"], "off")
    twin.resize(**LARGEST)
    twin.begin()
    engine = twin.engine
    engine.add(list(range(5)), greedy(2))
    twin.step()
    step = engine.step

    def stray() -> StepRecord:
        record = step()
        engine.caches.tensors()[pool][index] = 1.0
        return record

    monkeypatch.setattr(engine, "step", stray)
    with pytest.raises((AssertionError, IntegrityError), match=message):
        twin.step()


def test_padding_that_writes_the_zero_slot_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on an engine that now has another zero slot than it was built with."""
    row = Row("hybrid", "evicted", BLOCK, "prefill", False, "padded")
    twin = warm_twin(row.config, row.graphs)
    twin.resize(**options(row))
    assert twin.engine.sizes.zero_slot < twin.largest.zero_slot
    twin.begin()
    twin.engine.add(list(range(5)), greedy(2))
    step = twin.engine.step

    def stray() -> StepRecord:
        record = step()
        twin.engine.caches.ssm[:, twin.largest.zero_slot] = 1.0
        return record

    monkeypatch.setattr(twin.engine, "step", stray)
    with pytest.raises(AssertionError, match="wrote the zero slot"):
        twin.step()


Spoil = Callable[[Caches, StepRecord], None]


def spoil_states(caches: Caches, record: StepRecord) -> None:
    """Exchange the heads of each row's state."""
    slots = [row.slot_id for row in record.rows]
    caches.ssm[:, slots] = caches.ssm[:, slots].flip(2)


def spoil_stored_states(caches: Caches, record: StepRecord) -> None:
    """Exchange the heads of each state that is stored."""
    slots = [each.slot_id for row in record.rows for each in row.snapshots]
    caches.ssm[:, slots] = caches.ssm[:, slots].flip(2)


def spoil_windows(caches: Caches, record: StepRecord) -> None:
    """Move each row's window on by a token."""
    slots = [row.slot_id for row in record.rows]
    caches.conv[:, slots] = caches.conv[:, slots].roll(1, -1)


def spoil_values(caches: Caches, record: StepRecord) -> None:
    """Exchange the heads of the value that each row computed last."""
    for row in record.rows:
        block, place = divmod(row.end - 1, BLOCK)
        value = caches.kv[1, :, row.block_table[block], place]
        caches.kv[1, :, row.block_table[block], place] = value.flip(1)


SPOILS: dict[str, Spoil] = {
    "SSM state": spoil_states,
    "SSM state stored": spoil_stored_states,
    "conv window": spoil_windows,
    "K/V": spoil_values,
}


@pytest.mark.parametrize("kept", SPOILS)
@pytest.mark.parametrize("model", ["hybrid", *SHORT_MODELS])
def test_what_is_kept_wrong_is_seen_in_any_dtype(
    model: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, in what is kept itself, and in the widest class that there is."""
    row = Row(model, "warm", ALL, "decode", False, "off")
    twin = warm_twin(row.config, row.graphs)
    twin.resize(**options(row))
    monkeypatch.setattr(twin, "is_rounded", model in SHORT_MODELS)
    step = twin.engine.step

    def spoiled(**given: Any) -> StepRecord:
        record = step(**given)
        SPOILS[kept](twin.engine.caches, record)
        return record

    monkeypatch.setattr(twin.engine, "step", spoiled)
    name = kept.removesuffix(" stored")
    with pytest.raises(AssertionError, match=f"^{name}: .* roundoffs"):
        follow(recorded(row), twin, Ties(), planned=False)


def without_own_token(attend: Part) -> Part:
    """Attend from each token to those before it alone."""
    return lambda *given: attend(
        *given[:-1], replace(given[-1], context_lens=given[-1].context_lens - 1)
    )


def first_block_twice(attend: Part) -> Part:
    """Read the first block of each row for its second."""

    def spoiled(*given: Any) -> Any:
        tables = given[-1].block_tables.clone()
        tables[:, 1:2] = tables[:, :1]
        return attend(*given[:-1], replace(given[-1], block_tables=tables))

    return spoiled


def small_scores(attend: Part) -> Part:
    """Multiply scores by four fifths."""
    return lambda *given: attend(*given[:3], given[3] * 0.8, given[4])


def light_experts(route: Part) -> Part:
    """Take a twentieth off the weight of each expert."""

    def spoiled(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        experts, weights = route(*given)
        return experts, weights * 0.95

    return spoiled


FAULTS: dict[str, tuple[str, Callable[[Part], Part]]] = {
    "own token": ("attend_decode", without_own_token),
    "second block": ("attend_decode", first_block_twice),
    "scores": ("attend_decode", small_scores),
    "experts": ("route", light_experts),
}


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case[0])
@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (model, fault)
        for model, config in SHORT_MODELS.items()
        for fault in FAULTS
        if fault != "experts" or "E" in config.layer_pattern
    ],
)
def test_what_is_computed_wrong_is_seen_where_kernels_round(
    model: str,
    case: tuple[str, int, str, bool],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the spread of log-probabilities alone, whatever the largest is; else not."""
    row = Row(model, *case, "off")
    name, spoil = FAULTS[fault]
    twin = warm_twin(row.config, row.graphs)
    twin.resize(**options(row))
    monkeypatch.setattr(twin, "is_rounded", True)
    monkeypatch.setattr(tolerances, "MEASURED", {})
    follow(recorded(row), twin, Ties(), planned=False)
    kinds = {each.rpartition(" ")[2] for each in tolerances.MEASURED if "root" in each}
    assert kinds == {"prefill", "decode"}
    monkeypatch.setattr(tolerances, "KERNEL_LOGPROBS", torch.inf)
    loose = dict.fromkeys(tolerances.KERNEL_STATES, torch.inf)
    monkeypatch.setattr(tolerances, "KERNEL_STATES", loose)
    parts = twin.engine.model.components
    spoiled = replace(parts, **{name: spoil(getattr(parts, name))})
    monkeypatch.setattr(twin.engine.model, "components", spoiled)
    with pytest.raises(AssertionError, match="the root mean square of differences"):
        follow(recorded(row), twin, Ties(), planned=False)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_resized_engine_is_one_built_so(graphs: str) -> None:
    """Small pools and budgets that were not there when it was built are kept to."""
    noted: list[dict[str, object]] = []
    for is_warm in (False, True):
        noted.append({})
        for row in (
            Row("hybrid", "evicted", SCAN_CHUNK + 1, "mixed", True, graphs),
            Row("hybrid", "off", BLOCK, "prefill", False, graphs),
        ):
            hold_together(row, noted[-1].__setitem__, is_warm)
    assert noted[0] == noted[1] and noted[0][f"steps of {graphs}"]


def test_no_row_passes_for_another() -> None:
    """What one row's record shows is not what any other kind of row is about."""
    row = Row("hybrid", "cold", ALL, "prefill", False, "off")
    seen = seen_events(row, recorded(row))
    assert expected_events(row) <= seen
    others = [replace(row, cache=c) for c in AXES["cache"] if c != row.cache]
    others += [replace(row, phase=p) for p in AXES["phase"] if p != row.phase]
    others += [replace(row, preemption=True), replace(row, chunk=SCAN_CHUNK)]
    for other in others:
        assert expected_events(other) - seen_events(other, recorded(row)), str(other)


def test_only_ties_are_left_open() -> None:
    """Two tokens within the bound count as a tie; any other difference is a fault."""
    logprobs, ties = torch.tensor([-1.0, -1.001, -3.0]), Ties()
    ties.compare(1, 0, logprobs, greedy(), 5, bound=0.01)
    assert (ties.tokens, ties.ties) == (1, 1)
    with pytest.raises(AssertionError, match="token 2, not 0, at 5"):
        ties.compare(2, 0, logprobs, greedy(), 5, bound=0.01)
    with pytest.raises(AssertionError, match="token 1, not 0, at 5"):
        ties.compare(1, 0, logprobs, greedy(), 5, bound=0.0001)
    with pytest.raises(AssertionError, match="2 of 2 tokens are ties"):
        Ties(tokens=2, ties=2).report(lambda *_: None, "float32")
