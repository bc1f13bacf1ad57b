"""Every family in an engine: cached, cut and crowded equals alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config import ModelConfig
from lockstep.families import read_model_config
from tests.checkpoints import BASES
from tests.engines import assert_equals_lone, drain, greedy, make_engine, serve

#: Every family, and those of its variants that compute something else.
MODELS: dict[str, dict[str, Any]] = {
    **{family: {"model_type": family} for family in BASES},
    "granitemoehybrid, no experts": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "llama, llama3": {
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    },
}
#: Models without a chunk of their own take this one as block as well.
BLOCK = 16
SAMPLING = greedy(6)


def model_config(name: str) -> ModelConfig:
    """Read a tiny model's config."""
    fields = MODELS[name]
    return read_model_config({**BASES[fields["model_type"]], **fields})


def prompt(length: int, seed: int) -> list[int]:
    """Draw a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(96, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_cached_cut_and_crowded(name: str) -> None:
    """All log-probabilities and tokens are those of a lone, uncached, whole prompt."""
    config = model_config(name)
    engine = make_engine(config, block_size=BLOCK, max_tokens_per_step=21)
    first = prompt(3 * BLOCK, 1)
    siblings = [first, first[: 2 * BLOCK + 5] + prompt(9, 2), prompt(BLOCK + 3, 3)]
    cold, run = serve(engine, [first], SAMPLING)
    warm, crowded = serve(engine, siblings, SAMPLING)
    turn, later = serve(engine, [first + warm[0].token_ids + prompt(20, 4)], SAMPLING)
    assert sum(row.end - row.start for row in run.records[0].rows) < len(first)
    for outputs, steps in ((cold, run), (warm, crowded), (turn, later)):
        for output in outputs:
            assert_equals_lone(config, output, steps, SAMPLING)
    # Attention alone can go on from anywhere, a state only from a block's end.
    skipped = [output.cache.num_skipped_tokens for output in (*warm, *turn)]
    has_states = config.num_mamba_layers > 0
    assert skipped[0] == (2 * BLOCK if has_states else 3 * BLOCK - 1)
    assert skipped[1:3] == [2 * BLOCK, 0]
    assert skipped[3] == 3 * BLOCK


@pytest.mark.parametrize("name", MODELS)
def test_preempted(name: str) -> None:
    """Too few blocks for all: whoever is preempted comes to the same end."""
    config = model_config(name)
    engine = make_engine(config, block_size=BLOCK, num_blocks=6, max_tokens_per_step=32)
    sampling = greedy(20)
    for seed in range(3):
        engine.add(prompt(BLOCK + 9, seed), sampling)
    run = drain(engine)
    assert any(record.plan.preempted for record in run.records)
    for output in run.outputs.values():
        assert_equals_lone(config, output, run, sampling)
