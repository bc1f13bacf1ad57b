"""A model of published size on one GPU, through the reference engine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shapes import NANO3
from benchmarks.workloads import tokens
from lockstep import LLM, EngineConfig, RandomWeights, SamplingParams

pytestmark = pytest.mark.gpu


def test_nano3_restores_bit_for_bit() -> None:
    """31.6 billion parameters drawn on the device; a restore changes no bit."""
    config = EngineConfig(
        max_requests=2,
        max_tokens_per_step=256,
        max_length=512,
        num_blocks=8,
        snapshot_slots=4,
        record_logprobs=True,
        debug=("integrity", "checksums"),
    )
    llm = LLM.from_config(
        NANO3, weights=RandomWeights(seed=0), engine_config=config, verbose=False
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = tokens(1, 131)

    def serve() -> tuple[int, list[int], torch.Tensor]:
        llm.engine.add(prompt, sampling, "it")
        found: list[torch.Tensor] = []
        while True:
            record = llm.engine.step()
            found.append(record.logprobs["it"])
            for output in record.finished:
                skipped = output.cache.num_skipped_tokens
                return skipped, output.token_ids, torch.cat(found)

    cold, first, expected = serve()
    warm, second, restored = serve()
    assert (cold, warm) == (0, 128)
    assert first == second
    assert torch.equal(restored, expected[warm:])
    assert expected.isfinite().all()
