"""Three published scenarios of prefix caching under graphs, with their own numbers.

They came with Megatron-LM#3922: models, prompts and sizes are as they stand there. Each
is also played as what it was meant to reach and did not: a state stored while another
is restored, and slices that run at padded shapes together with a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import pytest

from lockstep.config import AttentionConfig, MambaConfig, MlpConfig, ModelConfig
from lockstep.trace import StepRecord
from tests.engines import greedy, make_engine
from tests.following import Ties, follow, twin_of
from tests.matrix import GRAPHS, Recorder, Recording
from tests.scenarios.common import branch, is_mixed, text

VOCAB, BLOCK, NEW = 10_000, 256, 8
_ATTENTION = ModelConfig(
    family="tiny",
    layer_pattern="*-*-*-*-",
    vocab_size=VOCAB,
    hidden_size=32,
    max_positions=2048,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8),
    mlp=MlpConfig(size=128),
)
MODELS = {
    "attention": _ATTENTION,
    "hybrid": replace(
        _ATTENTION,
        layer_pattern="M*-",
        hidden_size=256,
        dtype="bfloat16",
        attention=AttentionConfig(num_heads=16, num_kv_heads=16, head_dim=16),
        mamba=MambaConfig(num_heads=16, head_dim=32, state_size=128, num_groups=8),
        mlp=MlpConfig(size=1024),
    ),
}
#: 300 tokens, the same again, and two that share the first 256.
STEM = text(300, 1, VOCAB)
PROMPTS = (
    STEM,
    STEM,
    branch(STEM[:BLOCK], 500, 2),
    branch(STEM[:BLOCK], 600, 3),
)
LONG = [text(512, seed, VOCAB) for seed in (4, 5, 6)]

Options = tuple[tuple[str, Any], ...]
Note = Callable[[str, object], None]


def options(**changes: Any) -> Options:
    """Return the sizes of an engine, those of the source unless told otherwise."""
    sizes = {
        "max_requests": 16,
        "max_tokens_per_step": 2048,
        "num_blocks": 32,
        "block_size": BLOCK,
        "snapshot_slots": 8,
    }
    return tuple((sizes | changes).items())


@lru_cache(maxsize=1)
def recorded(model: str, settings: Options, waves: tuple[int, ...]) -> Recording:
    """Play waves of prompts on the reference.

    Args:
        model: One of `MODELS`.
        settings: Sizes.
        waves: How many prompts come at once; the next ones when all of these decode.
    """
    engine = make_engine(MODELS[model], debug=(), **dict(settings))
    recorder = Recorder(engine)
    names = iter(enumerate(PROMPTS))
    for count in waves:
        came = [next(names) for _ in range(count)]
        for number, prompt in came:
            recorder.add(f"r{number}", prompt, greedy(NEW))
        drawn: set[str] = set()
        while len(drawn) < count:
            drawn |= set(recorder.step().tokens)
    recorder.drain()
    return recorder.recording


def followed(
    model: str, settings: Options, recording: Recording, graphs: str, note: Note
) -> list[StepRecord]:
    """Let the optimized engine do the same; return its records of steps with rows."""
    ties = Ties()
    records = follow(recording, twin_of(MODELS[model], graphs, settings), ties, False)
    ties.report(note, MODELS[model].dtype)
    return [record for record in records if record.rows]


def generated(recording: Recording) -> dict[str, list[int]]:
    """Return the tokens generated for each request."""
    return {name: tokens[-NEW:] for name, tokens in recording.tokens.items()}


@cache
def tokens_of(play: Any, *args: Any) -> tuple[dict[str, list[int]], int]:
    """Play once and keep no more than tokens and the number of steps."""
    recording = play.__wrapped__(*args)
    return generated(recording), len(recording.records)


def computed(records: Sequence[StepRecord]) -> int:
    """Count prefill tokens."""
    return sum(record.shape.prefill_tokens for record in records)


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("waves", [(4,), (2, 2)], ids=["at once", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_prefixes_and_graphs(
    model: str, waves: tuple[int, ...], graphs: str, record_property: Note
) -> None:
    """Four prompts with common prefixes, in steps of every kind."""
    settings = options()
    recording = recorded(model, settings, waves)
    alone, _ = tokens_of(recorded, model, options(prefix_caching=False), (4,))
    assert generated(recording) == alone
    records = followed(model, settings, recording, graphs, record_property)
    mode = {"off": "eager", "padded": "padded", "all": "graph"}[graphs]
    assert {record.mode for record in records} == {mode}
    shapes = [record.shape for record in records]
    assert any(s.prefill_requests and not s.decode_requests for s in shapes)
    assert any(s.decode_requests and not s.prefill_requests for s in shapes)
    assert any(map(is_mixed, records)) or waves == (4,)
    assert computed(records) < sum(map(len, PROMPTS))


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("budget", [400, 1200])
def test_prefixes_and_slices(budget: int, graphs: str, record_property: Note) -> None:
    """A prompt seeds the cache, one leaves it in slices, one is the seed again.

    The source stores no state in a step in which another is restored; here the long
    prompt's last slice does, in steps of 400 tokens, and its only one in steps of 1200.
    """
    settings = options(max_tokens_per_step=budget)
    recording = _chunked(budget, True)
    assert generated(recording) == tokens_of(_chunked, 2048, False)[0]
    records = followed("hybrid", settings, recording, graphs, record_property)
    assert records[0].stored_states
    reports = {
        row.request_id: row.cache
        for record in records
        for row in record.rows
        if row.cache is not None
    }
    assert reports["r1"].matched_kv_tokens == BLOCK
    assert reports["r2"].matched_state_tokens == reports["r2"].num_skipped_tokens
    assert reports["r2"].num_skipped_tokens == BLOCK
    assert computed(records) < 1400
    both = [
        record
        for record in records
        if any(row.snapshots for row in record.plan.prefill_rows)
        and any(row.start and row.cache for row in record.rows if not row.snapshots)
    ]
    assert both


@lru_cache(maxsize=1)
def _chunked(budget: int, caching: bool) -> Recording:
    settings = options(max_tokens_per_step=budget, prefix_caching=caching)
    engine = make_engine(MODELS["hybrid"], debug=(), **dict(settings))
    recorder = Recorder(engine)
    recorder.add("r0", STEM, greedy(NEW))
    recorder.drain()
    recorder.add("r1", branch(STEM[:BLOCK], 800, 7), greedy(NEW))
    recorder.add("r2", STEM, greedy(NEW))
    recorder.drain()
    return recorder.recording


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("budget", [2048, 768], ids=["whole", "sliced"])
@pytest.mark.parametrize("model", MODELS)
def test_slices_and_graphs(
    model: str, budget: int, graphs: str, record_property: Note
) -> None:
    """Three prompts that share nothing, whole or in slices, with room for 128."""
    settings = options(max_tokens_per_step=budget, max_requests=128)
    whole, num_steps = tokens_of(_disjoint, model, 2048)
    recording = _disjoint(model, budget)
    assert generated(recording) == whole
    assert (len(recording.records) > num_steps) == (budget == 768)
    records = followed(model, settings, recording, graphs, record_property)
    if graphs == "padded":
        # Slices too, which the source's largest graph was too small for.
        assert {record.mode for record in records} == {"padded"}
        assert any(record.padded_shape != record.shape for record in records)


@lru_cache(maxsize=1)
def _disjoint(model: str, budget: int) -> Recording:
    settings = options(max_tokens_per_step=budget, max_requests=128)
    recorder = Recorder(make_engine(MODELS[model], debug=(), **dict(settings)))
    for number, prompt in enumerate(LONG):
        recorder.add(f"r{number}", prompt, greedy(NEW))
    recorder.drain()
    return recorder.recording
