"""Test models are witnesses: no state or block can be wrong without being seen.

With default-like weights a state is forgotten within tokens, and a suite of tests is
blind to it. Here a prompt is served twice, and what the second restores is falsified
one piece at a time; each must change the log-probabilities that tests compare by at
least a hundred times the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import LLM, EngineConfig, RandomWeights
from lockstep.blocks import BlockHash, extend_hashes
from tests import matrix, witness
from tests.checkpoints import save
from tests.engines import greedy, make_engine
from tests.factories import MODEL_NAMES, model_config
from tests.test_transformers import VARIANTS
from tests.tolerances import (
    ENGINE_LOGPROBS,
    TRANSFORMERS_LOGPROBS,
    UNIT_ROUNDOFF,
    WITNESS_FACTOR,
)

#: Least effect of a fault.
VISIBLE = WITNESS_FACTOR * max(
    TRANSFORMERS_LOGPROBS, ENGINE_LOGPROBS * UNIT_ROUNDOFF[torch.float32]
)
#: Tokens restored; the prompt goes on a little.
RESTORED, LENGTH = 32, 40

Fault = tuple[str, Callable[[], object]]


def prompt_for(engine: Any) -> list[int]:
    """Draw a prompt."""
    generator = torch.Generator().manual_seed(11)
    vocab = engine.model_config.vocab_size
    return torch.randint(vocab, (LENGTH,), generator=generator).tolist()


def serve(engine: Any, prompt: list[int]) -> Tensor:
    """Serve a prompt and return the log-probabilities after its last tokens."""
    name = engine.add(prompt, greedy(1))
    parts: list[Tensor] = []
    while engine.has_work:
        parts.append(engine.step().logprobs[name])
    return torch.cat(parts)[-(LENGTH - RESTORED) :]


def state_before(engine: Any, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """Compute the states one token before the restored ones, and leave no trace."""
    saved = engine.export_state()
    engine.reset()
    name = engine.add(prompt[: RESTORED - 1], greedy(2))
    engine.step()
    slot = engine.scheduler.find(name).slot_id
    early = engine.caches.conv[:, slot].clone(), engine.caches.ssm[:, slot].clone()
    engine.import_state(saved)
    return early


def faults_of(engine: Any, prompt: list[int]) -> Iterator[Fault]:
    """List every way to falsify one piece of what is restored."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, prompt[:RESTORED], engine.sizes.block_size)
    caches = engine.caches
    if engine.model_config.num_mamba_layers:
        slot = engine.export_state().slots.stored[hashes[-1]]
        early = state_before(engine, prompt)
        pools = {"conv": caches.conv[:, slot], "ssm": caches.ssm[:, slot]}
        for (kind, pool), old in zip(pools.items(), early, strict=True):
            for layer, state in enumerate(pool):
                yield f"{kind} of layer {layer} zeroed", state.zero_
                yield (
                    f"{kind} of layer {layer} early",
                    lambda s=state, o=old[layer]: s.copy_(o),
                )
            for pair in combinations(range(len(pool)), 2):
                swapped = pool[[*reversed(pair)]]
                yield (
                    f"{kind} of layers {pair} exchanged",
                    lambda p=pool, i=[*pair], s=swapped: p.index_copy_(
                        0, torch.tensor(i), s
                    ),
                )
    if engine.model_config.num_attention_layers:
        owners = engine.blocks.export_state().hashes
        for number, block_hash in enumerate(hashes):
            block = next(b for b, h in owners.items() if h == block_hash)
            for layer, kv in enumerate(caches.kv.unbind(1)):
                name = f"block {number} of layer {layer} blanked"
                yield name, kv[:, block].zero_


def assert_sees_all(engine: Any) -> None:
    """Falsify one piece after another and look at the log-probabilities."""
    prompt = prompt_for(engine)
    serve(engine, prompt)
    saved = engine.export_state()
    truth = serve(engine, prompt)
    engine.import_state(saved)
    blind: list[str] = []
    for name, falsify in list(faults_of(engine, prompt)):
        engine.import_state(saved)
        falsify()
        effect = float((serve(engine, prompt) - truth).abs().max())
        if not effect >= VISIBLE:
            blind.append(f"{name}: {effect:.2g}")
    assert not blind, blind


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_engine_models(name: str) -> None:
    """The models on which engines are tested."""
    assert_sees_all(make_engine(model_config(name), debug=()))


@pytest.mark.parametrize("name", witness.MODEL_NAMES)
def test_models_of_random_traces(name: str) -> None:
    """Those that random traces run on."""
    assert_sees_all(make_engine(witness.model_config(name), debug=()))


@pytest.mark.parametrize("name", matrix.MODELS)
def test_models_of_the_matrix(name: str) -> None:
    """Those on which both engines are held together."""
    assert_sees_all(make_engine(matrix.MODELS[name], debug=()))


@pytest.mark.filterwarnings("ignore:there are 4 snapshot slots")
@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """The checkpoints that are compared with `transformers`."""
    config = EngineConfig(
        max_requests=2,
        num_blocks=16,
        block_size=16,
        scan_chunk_size=16,
        snapshot_slots=4,
        record_logprobs=True,
    )
    folder = save(tmp_path, VARIANTS[name])
    assert_sees_all(LLM(folder, device="cpu", config=config, verbose=False).engine)


def test_default_weights_would_be_blind() -> None:
    """The check can fail: by the ordinary rule, states are not seen."""
    config = EngineConfig(num_blocks=16, snapshot_slots=4, record_logprobs=True)
    llm = LLM(
        model_config(),
        weights=RandomWeights(),
        device="cpu",
        config=config,
        verbose=False,
    )
    with pytest.raises(AssertionError, match="ssm of layer 0 early"):
        assert_sees_all(llm.engine)
