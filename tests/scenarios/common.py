"""What scenarios share: tiny models, prompts, and questions to ask of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from lockstep.assemble import build_components
from lockstep.blocks import BlockHash, extend_hashes
from lockstep.config import ModelConfig
from lockstep.plan import CacheReport, RowKind, RowPlan
from lockstep.request import RequestOutput, SamplingParams
from lockstep.trace import StepRecord
from tests.engines import (
    Run,
    assert_equals_lone,
    backend_of,
    drain,
    greedy,
    serve,
)
from tests.factories import model_config

#: Tokens in a block and in a scan chunk, unless a test says otherwise.
BLOCK = 16


@cache
def tiny(pattern: str = "M*", **changes: Any) -> ModelConfig:
    """Return a tiny model with these layers and a scan chunk of one block."""
    return replace(model_config("hybrid"), layer_pattern=pattern, **changes)


def text(length: int, seed: int = 0, vocab_size: int = 61) -> list[int]:
    """Return a prompt of its own for every seed; a longer one begins with it."""
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(length)]


def branch(stem: Sequence[int], length: int, seed: int) -> list[int]:
    """Return a prompt of ``length`` tokens that leaves a stem right at its end."""
    tail = text(length - len(stem), seed + 1000)
    return [*stem, *tail]


def serve_equal(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | None = None,
) -> tuple[list[RequestOutput], Run]:
    """Serve prompts added at once, each held to its lone run."""
    sampling = sampling or greedy(4)
    outputs, run = serve(engine, prompts, sampling)
    for output in outputs:
        assert_equals_lone(engine.model_config, output, run, sampling)
    return outputs, run


def ask(
    engine: Any, prompt: Sequence[int], sampling: SamplingParams | None = None
) -> RequestOutput:
    """Serve one prompt, held to its lone run."""
    return serve_equal(engine, [prompt], sampling)[0][0]


def drain_equal(
    engine: Any,
    sampling: SamplingParams | Mapping[str, SamplingParams],
    run: Run | None = None,
    between: Callable[[StepRecord], None] | None = None,
) -> Run:
    """Run what is in flight to the end, each request held to its lone run."""
    run = drain(engine, run, between)
    for name, output in run.outputs.items():
        mine = sampling if isinstance(sampling, SamplingParams) else sampling[name]
        assert_equals_lone(engine.model_config, output, run, mine)
    return run


def rows_of(run: Run, request_id: str) -> list[RowPlan]:
    """List the rows in which a request took part."""
    rows = [row for record in run.records for row in record.rows]
    return [row for row in rows if row.request_id == request_id]


def slices_of(run: Run, request_id: str) -> list[tuple[int, int]]:
    """List the prefill slices of a request."""
    rows = rows_of(run, request_id)
    return [(row.start, row.end) for row in rows if row.kind is RowKind.PREFILL]


def reports_of(run: Run, request_id: str) -> list[CacheReport]:
    """List what the cache did at each admission of a request."""
    return [row.cache for row in rows_of(run, request_id) if row.cache is not None]


def snapshots_of(run: Run, request_id: str) -> list[int]:
    """List the positions at which a request's states were to be stored."""
    rows = rows_of(run, request_id)
    return [snapshot.position for row in rows for snapshot in row.snapshots]


def num_computed(run: Run) -> int:
    """Count the tokens computed over all steps."""
    return sum(record.shape.tokens for record in run.records)


def is_mixed(record: StepRecord) -> bool:
    """Tell whether a step both decoded and prefilled."""
    return record.shape.decode_requests > 0 and record.shape.prefill_requests > 0


def first_ending(records: Sequence[StepRecord], request_id: str) -> StepRecord:
    """Find the step in which a request ended."""
    for record in records:
        if any(output.request_id == request_id for output in record.finished):
            return record
    raise AssertionError(f"{request_id!r} never ended")


def hash_blocks(tokens: Sequence[int], block_size: int = BLOCK) -> list[BlockHash]:
    """Hash the full blocks of a token list."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, tokens, block_size)
    return hashes


def part(side: str, name: str) -> Any:
    """Return a component of a side by its symbol."""
    return getattr(build_components(backend_of(side)), name)


def watched(side: str, name: str, watch: Callable[..., None]) -> Callable[..., Any]:
    """Return a function component that calls ``watch`` with its arguments first."""
    real = part(side, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        watch(*args, **kwargs)
        return real(*args, **kwargs)

    return wrapper


def watched_method(
    side: str, name: str, method: str, watch: Callable[..., None]
) -> type[Any]:
    """Return a class component one method of which calls ``watch`` first."""
    base = part(side, name)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch(*args, **kwargs)
        return getattr(base, method)(self, *args, **kwargs)

    return type(name, (base,), {method: wrapper})


def pool_totals(engine: Any) -> tuple[int, int, int]:
    """Count what nobody holds: blocks, live slots, snapshot slots, stored or free."""
    state = engine.export_state()
    cached = [b for b in state.blocks.hashes if not state.blocks.holders.get(b)]
    return (
        len(state.blocks.free) + len(cached),
        len(state.slots.free_live),
        len(state.slots.free_snapshots) + len(state.slots.stored),
    )


def assert_nothing_held(engine: Any) -> None:
    """Check that an idle engine holds no block and no slot."""
    assert not engine.has_work
    sizes = engine.sizes
    everything = (sizes.num_blocks, sizes.max_requests, sizes.snapshot_slots)
    assert pool_totals(engine) == everything
    engine.check_integrity()
