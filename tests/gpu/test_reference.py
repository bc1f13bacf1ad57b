"""The reference engine on a GPU: the same bits, however a request is served."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.batch import Draws
from lockstep.config import DTypeName
from lockstep.plan import RowKind
from tests.engines import (
    Run,
    assert_equals_lone,
    drain,
    greedy,
    make_engine,
    serve,
)
from tests.factories import make_draws, model_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16")
PROMPT = [(7 * i + i * i) % 61 for i in range(52)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restored_prompt_gives_the_same_bits(dtype: DTypeName) -> None:
    """A second, equal prompt starts from a stored state and repeats the first."""
    config = replace(model_config("hybrid"), dtype=dtype)
    engine = make_engine(config, device=CUDA)
    serve(engine, [PROMPT])
    outputs, run = serve(engine, [PROMPT])
    assert outputs[0].cache.num_skipped_tokens == 48
    assert_equals_lone(config, outputs[0], run, greedy(), CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [3, 17, 64])
def test_slices_and_company_give_the_same_bits(dtype: DTypeName, budget: int) -> None:
    """Prompts cut anywhere, in mixed steps, repeat their lone runs."""
    config = replace(model_config("hybrid"), dtype=dtype)
    engine = make_engine(config, device=CUDA, max_tokens_per_step=budget)
    prompts = [PROMPT, PROMPT[:20], PROMPT[:32] + PROMPT[:9], PROMPT[::-1]]
    outputs, run = serve(engine, prompts)
    kinds = [{row.kind for row in record.rows} for record in run.records]
    assert {RowKind.DECODE, RowKind.PREFILL} in kinds
    for output in outputs:
        assert_equals_lone(config, output, run, greedy(), CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption_and_a_second_turn_give_the_same_bits(dtype: DTypeName) -> None:
    """Requests computed again after preemption, and a turn after, do not drift."""
    config = replace(model_config("hybrid"), dtype=dtype)
    engine = make_engine(config, device=CUDA, num_blocks=5)
    sampling = greedy(20)
    run = Run()
    first = engine.add(PROMPT[:30], sampling)
    second = engine.add(PROMPT[10:40], sampling)
    drain(engine, run)
    assert any(record.plan.preempted for record in run.records)
    for name in (first, second):
        assert_equals_lone(config, run.outputs[name], run, sampling, CUDA)
    turn = run.outputs[second].prompt_token_ids + run.outputs[second].token_ids
    outputs, run = serve(engine, [[*turn[:50], 3]], greedy(4))
    assert outputs[0].cache.num_skipped_tokens >= 32
    assert_equals_lone(config, outputs[0], run, greedy(4), CUDA)


def test_sampled_tokens_equal_those_drawn_on_the_cpu() -> None:
    """The random numbers are the same on every device."""
    from lockstep.reference import sampler

    vocab, rows = 1000, 64
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator)
    draws = make_draws(
        rows,
        temperatures=torch.linspace(0.1, 2.0, rows).tolist(),
        seeds=[7919 * row for row in range(rows)],
        positions=[row + 5 for row in range(rows)],
        top_ks=[row % 3 * 50 for row in range(rows)],
        top_ps=[1 - row % 4 / 10 for row in range(rows)],
        min_ps=[row % 5 / 50 for row in range(rows)],
        banned_ids=[[row, 999][: row % 3] for row in range(rows)],
    )
    here = sampler.sample(logits, Draws(*(array.cpu() for array in draws)))
    there = sampler.sample(logits.to(CUDA), Draws(*(array.to(CUDA) for array in draws)))
    assert torch.equal(here, there.cpu())
