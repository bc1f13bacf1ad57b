"""Padded steps: shapes that every step fits, fixed places, one copy and one read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lockstep.assemble import build_components, settle_options
from lockstep.batch import BatchMetadata
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.plan import BatchShape
from lockstep.policy import graph_shapes, host_shape
from lockstep.request import RequestOutput
from tests.engines import CPU, drain, greedy, make_engine, serve
from tests.factories import load
from tests.host_reads import no_host_reads, recorded_host_reads
from tests.scenarios.common import is_mixed, text, tiny
from tests.tolerances import assert_equal, assert_reports

MODEL = tiny("M*E")
LIMITS = [(1, 1), (1, 40), (3, 2), (4, 64), (7, 17), (64, 2048)]


# Shapes.


def legal_shapes(max_requests: int, max_tokens: int) -> list[BatchShape]:
    """List steps at the edges of every count, of which a prefill row has one token."""
    counts = {0, 1, 2, 3, max_requests // 2, max_requests - 1, max_requests}
    tokens = {1, 15, 16, 17, 31, 33, max_tokens // 2 + 1, max_tokens - 1, max_tokens}
    return [
        BatchShape(decodes + prefilled, prefills, decodes)
        for decodes in sorted(counts)
        for prefills in sorted(counts)
        for prefilled in sorted(tokens | {0, prefills})
        if 0 < decodes + prefills <= max_requests
        and decodes + prefilled <= max_tokens
        and (prefills <= prefilled if prefills else not prefilled)
    ]


@pytest.mark.parametrize(("max_requests", "max_tokens"), LIMITS)
def test_every_step_fits_a_shape(max_requests: int, max_tokens: int) -> None:
    """So admission need not know of shapes, and none is too small by a row."""
    shapes = graph_shapes(max_requests, max_tokens)
    steps = legal_shapes(max_requests, max_tokens)
    assert steps and list(shapes) == sorted(set(shapes))
    for step in steps:
        host = host_shape(step, shapes)
        assert host is not None, step
        assert host.tokens >= step.tokens
        assert host.decode_requests >= step.decode_requests
        assert host.prefill_requests >= step.prefill_requests
        assert host.prefill_tokens >= step.prefill_tokens
        # No smaller one would do.
        assert host == min(
            each for each in shapes if host_shape(step, [each]) is not None
        )


@pytest.mark.parametrize(("max_requests", "max_tokens"), LIMITS)
def test_the_largest_shapes_are_the_limits(max_requests: int, max_tokens: int) -> None:
    """A shape beyond what a step can be would be captured for nothing."""
    shapes = graph_shapes(max_requests, max_tokens)
    rows = min(max_requests, max_tokens)
    assert max(shape.prefill_tokens for shape in shapes) == max_tokens
    assert max(shape.decode_requests for shape in shapes) == rows
    assert max(shape.prefill_requests for shape in shapes) == rows
    only = graph_shapes(max_requests, max_tokens, decode_only=True)
    assert {shape for shape in shapes if not shape.prefill_requests} == set(only)


def test_their_number_grows_with_logarithms() -> None:
    """Twice the requests, or twice the tokens, add no more than the last doubling."""
    by_tokens = [len(graph_shapes(64, 1024 * 2**n)) for n in range(4)]
    steps = {after - before for before, after in pairwise(by_tokens)}
    assert len(steps) == 1 and steps.pop() > 0
    assert len(graph_shapes(128, 4096)) < 2 * len(graph_shapes(64, 4096))


def test_a_step_of_decodes_gets_no_prefill_rows() -> None:
    """A padded prompt would cost a kernel of each kind for nothing."""
    shapes = graph_shapes(8, 64)
    assert host_shape(BatchShape(5, 0, 5), shapes) == BatchShape(8, 0, 8)
    assert host_shape(BatchShape(17, 1, 0), shapes) == BatchShape(32, 1, 0)


# Steps.


def padded_engine(graphs: str = "padded", **options: Any) -> Any:
    """Build an optimized engine whose steps are padded."""
    return make_engine(MODEL, "optimized", graphs=graphs, **options)


def start_mixed(engine: Any, count: int = 3) -> None:
    """Add prompts of which the last is cut, so that steps of every kind follow."""
    for index in range(count):
        engine.add(text(10 + 31 * index, seed=index), greedy(4, logprobs=1))


def test_steps_are_padded_and_say_so() -> None:
    """The record has both shapes; every kind of step is run at one of the list."""
    engine = padded_engine(max_tokens_per_step=40)
    start_mixed(engine)
    records = drain(engine).records
    assert {record.mode for record in records} == {"padded"}
    assert any(map(is_mixed, records))
    assert any(record.shape != record.padded_shape for record in records)
    for record in records:
        shape = host_shape(record.shape, engine.sizes.graph_shapes)
        assert record.padded_shape == shape and not record.eager_reason


def test_an_engine_without_shapes_runs_as_it_is() -> None:
    """Nothing was asked for, so nothing is to be explained."""
    engine = make_engine(MODEL, "optimized")
    start_mixed(engine)
    for record in drain(engine).records:
        assert (record.mode, record.eager_reason) == ("eager", "")
        assert record.padded_shape == record.shape


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"record_logprobs": False}, greedy(2, prompt_logprobs=1)),
        ({}, greedy(2, min_tokens=2, stop_token_ids=tuple(range(9)))),
    ],
    ids=["logits", "banned tokens"],
)
def test_a_step_that_fits_no_room_says_why(
    options: dict[str, Any], sampling: Any
) -> None:
    """It runs eagerly at its real size, with the same result."""
    engine = padded_engine(**options)
    outputs, run = serve(engine, [text(20)], sampling)
    first = run.records[0]
    assert (first.mode, first.padded_shape) == ("eager", first.shape)
    assert "than a graph has room for" in first.eager_reason
    reasons = [record.eager_reason for record in run.records if record.eager_reason]
    assert engine.graphs.eager_steps == Counter(reasons)
    theirs, _ = serve(make_engine(MODEL, "optimized", **options), [text(20)], sampling)
    assert outputs[0].token_ids == theirs[0].token_ids
    plain, run = serve(padded_engine(**options), [text(20)], greedy(2))
    assert run.records[0].mode == "padded" and plain[0].token_ids


def test_only_tokens_and_reports_are_read() -> None:
    """One read a step, and none by any other way, in steps of every kind."""
    for graphs in ("off", "padded"):
        engine = padded_engine(graphs, debug=(), max_tokens_per_step=40)
        start_mixed(engine)
        kinds: list[bool] = []
        while engine.has_work:
            with recorded_host_reads() as reads:
                record = engine.step()
            assert record.host_reads == len(reads) == bool(record.tokens)
            assert set(reads) <= {"tolist"}
            kinds.append(is_mixed(record))
        assert set(kinds) == {False, True}


def test_reports_are_the_references() -> None:
    """Padded draws stand between tokens and reports, and get into neither."""
    found: list[dict[str, RequestOutput]] = []
    options: dict[str, Any] = {"max_tokens_per_step": 40}
    for engine in (make_engine(MODEL, **options), padded_engine(**options)):
        for index in range(3):
            sampling = greedy(3 + index, logprobs=index // 2, prompt_logprobs=1)
            engine.add(text(10 + 31 * index, seed=index), sampling, f"{index}")
        found.append(drain(engine).outputs)
    for name, expected in found[0].items():
        assert_reports("optimized", found[1][name].logprobs, expected.logprobs)
        prompts = found[1][name].prompt_logprobs, expected.prompt_logprobs
        assert_reports("optimized", *prompts)


def test_a_slice_without_a_token_reads_nothing() -> None:
    """The host goes on before the device is done."""
    engine = padded_engine(debug=(), max_tokens_per_step=16)
    engine.add(text(40), greedy(1))
    with no_host_reads():
        record = engine.step()
    assert record.shape.tokens == 16 and not record.host_reads


def watch_batches(engine: Any) -> list[BatchMetadata]:
    """Keep every batch that an engine's model is given, as it is at that moment."""
    batches: list[BatchMetadata] = []
    forward = engine.model.forward

    def watched(batch: BatchMetadata, caches: Any) -> Any:
        batches.append(batch)
        return forward(batch, caches)

    engine.model.forward = watched
    return batches


def addresses(batch: BatchMetadata) -> list[int]:
    """Return where the arrays of a batch lie."""
    arrays = [getattr(batch, field.name) for field in fields(batch)]
    tensors = [each for each in arrays if isinstance(each, torch.Tensor)]
    return [each.data_ptr() for each in (*tensors, *batch.draws)]


def test_a_shape_has_its_places_for_good() -> None:
    """Every step of a shape finds its arrays where the first one did."""
    engine = padded_engine()
    batches = watch_batches(engine)
    for _ in range(2):
        start_mixed(engine)
        drain(engine)
    places: dict[BatchShape, list[int]] = {}
    for batch in batches:
        theirs = places.setdefault(batch.padded_shape, addresses(batch))
        assert addresses(batch) == theirs
    assert 1 < len(places) < len(batches)


def test_a_small_step_keeps_nothing_of_a_large_one() -> None:
    """Whatever a shape held before, its arrays are those of this step alone."""
    engine, fresh = padded_engine(), padded_engine()
    for index in range(4):
        engine.add(text(15, seed=index), greedy(3))
    drain(engine)
    engine.reset()
    for each in (engine, fresh):
        each.add(text(33), greedy(2))
    first, second = engine.scheduler.plan(), fresh.scheduler.plan()
    assert [row.end for row in first.rows] == [row.end for row in second.rows]
    arrays: list[Sequence[torch.Tensor]] = []
    for each, plan in ((engine, first), (fresh, second)):
        batch = each._prepare(plan)
        values = [getattr(batch, field.name) for field in fields(batch)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        arrays.append([*tensors, *batch.draws])
    for mine, theirs in zip(*arrays, strict=True):
        assert_equal(mine, theirs)


def test_padding_reads_and_writes_dummies_alone() -> None:
    """Poisoned dummies change nothing, and nothing else is touched by padding.

    The dummy block and slot are filled with NaN before every step: whatever a real row
    read of them would show.
    """
    found: list[list[list[int]]] = []
    for is_poisoned in (False, True):
        engine = padded_engine(max_tokens_per_step=40)
        start_mixed(engine)
        tokens: list[list[int]] = []
        while engine.has_work:
            if is_poisoned:
                engine.caches.kv[:, :, engine.sizes.dummy_block] = math.nan
                for pool in engine.caches.tensors()[1:]:
                    pool[:, engine.sizes.dummy_slot] = math.nan
            record = engine.step()
            for values in record.logprobs.values():
                assert bool(torch.isfinite(values).all())
            tokens += [output.token_ids for output in record.finished]
        found.append(tokens)
    assert found[0] == found[1]


# The buffer.


def test_the_buffer_takes_turns_and_holds_the_last() -> None:
    """What is on the device is what was sent last, in its own dtypes and shapes."""
    import numpy as np

    buffer = load("optimized", "buffers").StepBuffer(4096, torch.device("cpu"))
    rng = np.random.default_rng(0)
    kept: dict[str, torch.Tensor] = {}
    for turn in range(5):
        arrays = {
            "ids": rng.integers(0, 99, (3, 5)),
            "mask": rng.integers(0, 2, 7).astype(bool),
            "values": rng.normal(size=4).astype(np.float32),
            "shares": rng.normal(size=2),
        }
        sent = buffer.send("key", arrays)
        for name, array in arrays.items():
            assert_equal(sent[name], torch.from_numpy(array))
        if turn:
            assert all(sent[n].data_ptr() == kept[n].data_ptr() for n in sent)
        kept = sent


# What is refused.


def test_a_loop_is_refused_where_steps_are_padded() -> None:
    """The message names the component, the option and the way out."""
    parts: dict[str, Any] = {"scan.scan_prefill": "reference"}
    with pytest.raises(ConfigError, match='scan_prefill.*graphs="off"'):
        make_engine(MODEL, "optimized", graphs="padded", components=parts)
    engine = make_engine(MODEL, "optimized", graphs="off", components=parts)
    assert serve(engine, [text(20)])[0][0].token_ids
    # Bookkeeping runs on the host in any case.
    books: dict[str, Any] = {"kv_blocks.BlockPool": "reference"}
    engine = make_engine(MODEL, "optimized", graphs="padded", components=books)
    assert serve(engine, [text(20)])[0][0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": "all"}, 'needs a GPU; "padded" runs the same'),
        ({"graphs": "decode"}, "needs a GPU"),
        ({"side_stream": True}, "side_stream needs a GPU"),
        ({"kernels": "triton"}, "Triton"),
    ],
    ids=str,
)
def test_what_a_cpu_cannot_do_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to use instead."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = EngineConfig(**options)
    with pytest.raises(ConfigError, match=message):
        settle_options(config, "optimized", CPU)


def test_options_are_settled_once() -> None:
    """What was left open is decided, what was set stands, and all is idempotent."""
    settled = settle_options(EngineConfig(), "optimized", CPU)
    assert (settled.graphs, settled.kernels, settled.side_stream) == (
        "off",
        "torch",
        False,
    )
    assert settle_options(settled, "optimized", CPU) == settled
    padded = replace(settled, graphs="padded")
    assert settle_options(padded, "optimized", CPU) == padded
    assert settle_options(EngineConfig(), "reference", CPU) == EngineConfig()


def test_a_component_may_be_named_by_its_place() -> None:
    """And a place that is none is told."""
    place = "lockstep.optimized.norm:rms_norm"
    parts = build_components("reference", {"norm.rms_norm": place})
    assert parts.rms_norm is load("optimized", "norm").rms_norm
    for wrong in ("lockstep.nowhere:x", "lockstep.optimized.norm:nothing"):
        with pytest.raises(ConfigError, match=f"norm.rms_norm='{wrong}'"):
            build_components("reference", {"norm.rms_norm": wrong})
