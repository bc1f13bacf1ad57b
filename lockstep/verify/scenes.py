"""The default workloads: all that an engine does, in small, on models that show it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from lockstep.config import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
)
from lockstep.request import SamplingParams

from .sides import Arrival, Disturbance, Workload

VOCAB = 61
_MAMBA = MambaConfig(
    num_heads=6, head_dim=3, state_size=5, num_groups=2, scan_chunk_size=16
)
_ATTENTION = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=6)
_MOE = MoeConfig(
    num_experts=6,
    top_k=2,
    expert_size=10,
    shared_size=11,
    num_groups=3,
    top_k_groups=2,
)
_WITNESS = ModelConfig(
    family="tiny",
    layer_pattern="M*-EM",
    vocab_size=VOCAB,
    hidden_size=20,
    max_positions=160,
    eos_token_ids=(0,),
    mamba=_MAMBA,
    attention=_ATTENTION,
    mlp=MlpConfig(size=21),
    moe=_MOE,
)
#: Small models: every kind of layer, and every variant of each in one or the other.
MODELS = {
    "witness": _WITNESS,
    "turned": replace(
        _WITNESS,
        layer_pattern="*M-E",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logit_divisor=0.8,
        mamba=replace(_MAMBA, num_norm_groups=1, time_step_limit=(0.2, 0.6)),
        attention=replace(
            _ATTENTION, qk_norm=True, rotary=RotaryConfig(theta=50.0, part=0.7)
        ),
        mlp=MlpConfig(size=21, activation="silu", gated=True, bias=True),
        moe=replace(
            _MOE,
            shared_size=0,
            num_groups=1,
            top_k_groups=1,
            scoring="softmax",
            latent_size=9,
            activation="silu",
            gated=True,
            bias=True,
        ),
    ),
    "attention": replace(_WITNESS, layer_pattern="*-*"),
}

#: Blocks that prompts are made of. Two read alike where digits are run together, and
#: each may follow any other, so that equal blocks have different pasts.
_BLOCKS = ([1, 11] * 8, [11, 1] * 8, list(range(20, 36)), [7, 3, 58, 40] * 4)
#: How tokens are drawn: every parameter, alone and with others.
_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 2.0, "top_p": 0.6, "top_k": 9},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.0, "prompt_logprobs": 1, "prompt_logprobs_from": 20},
    # All tokens but four end it, and may not come at first.
    {"temperature": 3.0, "min_tokens": 6, "stop_token_ids": (0, *range(5, VOCAB))},
    {"temperature": 0.0, "stop_token_ids": (*range(0, VOCAB, 7),), "ignore_eos": True},
)
_FEWER = {"num_blocks": 9, "snapshot_slots": 2, "max_tokens_per_step": 23}
_LEAN = {"record_logprobs": False}
#: Once and never again; then twice in a row, so that one request is at fault.
_FAILING = [
    Disturbance(4, at="norm.rms_norm"),
    Disturbance(9, at="sampler.sample"),
    Disturbance(17, at="norm.rms_norm"),
    Disturbance(18, at="norm.rms_norm"),
    Disturbance(25, at="snapshots.copy_states"),
]
_ABORTED = [
    Disturbance(6, abort=3),
    Disturbance(11, 7, "norm.rms_norm"),
    Disturbance(13, 9, "sampler.sample"),
    Disturbance(14, abort=0),
]
_LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
#: The same prompt again while the first is decoded, and again when all are done: they
#: complete equal blocks, hold the same ones, and end a few steps apart.
_TWINS = [
    Arrival([*_BLOCKS[2], *_BLOCKS[3], *range(length)], _LONG, step)
    for step, length in ((0, 7), (1, 7), (2, 7), (3, 0), (40, 7), (41, 0), (42, 0))
]
#: One that is to report from just behind a state on, which it must not start from.
_REPORTED = Arrival(
    [*_BLOCKS[2], *_BLOCKS[3], 1, 2, 3],
    replace(_LONG, prompt_logprobs=1, prompt_logprobs_from=32),
    43,
)
#: Two that leave a third at a block whose state nobody has stored, in one step.
_SIBLINGS = [
    Arrival([*_BLOCKS[2], *_BLOCKS[0], *range(first, last)], _LONG, step)
    for step, first, last in ((80, 30, 48), (82, 40, 48), (82, 50, 58))
]
#: What fits the pool of `_FEWER` exactly, and what does not by one token.
_LARGEST = [
    Arrival([*range(9), *_BLOCKS[0] * 7], replace(_LONG, max_tokens=count), 40)
    for count in (24, 25)
]


def scenes() -> list[Workload]:
    """Make the default workloads."""
    return [
        Workload(_draw_arrivals(24, seed=1), name="crowd"),
        Workload(
            _draw_arrivals(8, seed=5, stems=2),
            options={"ssm_state_dtype": "bfloat16"},
            name="short states",
        ),
        Workload(
            [
                *_TWINS,
                _REPORTED,
                *_draw_arrivals(10, seed=6, stems=2, pause=1),
                *_SIBLINGS,
            ],
            options={"max_tokens_per_step": 128, "snapshot_slots": 3},
            name="family",
        ),
        Workload(
            [*_draw_arrivals(20, seed=2), *_LARGEST],
            [*_FAILING, *_ABORTED],
            {**_FEWER, "eviction": "ref_zero"},
            "faults",
        ),
        Workload(
            _draw_arrivals(16, seed=3, stems=2),
            _ABORTED,
            {**_FEWER, **_LEAN},
            "variants",
            "turned",
        ),
        Workload(
            [*_TWINS, _REPORTED, *_draw_arrivals(8, seed=4, stems=1)],
            (),
            _LEAN,
            "no states",
            "attention",
        ),
    ]


def _draw_arrivals(
    count: int, seed: int, stems: int = len(_BLOCKS), pause: int = 3
) -> list[Arrival]:
    """Draw requests that share beginnings, some of them next turns of others.

    Args:
        count: How many.
        seed: Of all draws.
        stems: Of how many different blocks prompts are made.
        pause: Most steps between two of them.
    """
    draw, step, arrivals = random.Random(seed), 0, list[Arrival]()
    for index in range(count):
        step += draw.choice((0, *range(pause + 1)))
        path = [draw.choice(_BLOCKS[-stems:]) for _ in range(draw.randrange(4))]
        tail = draw.choice((0, 1, 2, 3, 8, 15)) or (0 if path else 1)
        prompt = [token for block in path for token in block]
        prompt += [draw.randrange(VOCAB) for _ in range(tail)]
        after = draw.randrange(index) if index > 4 and draw.random() < 0.3 else None
        if after is not None:
            prompt = prompt[-draw.randrange(1, 4) :]
        settings: dict[str, Any] = {**_DRAWS[index % len(_DRAWS)], "seed": index}
        if settings.get("prompt_logprobs_from", 0) >= len(prompt):
            settings["prompt_logprobs_from"] = 0
        longest = draw.choice((1, 2, 4, 9, 17, 25))
        settings["max_tokens"] = max(longest, settings.get("min_tokens", 0))
        arrivals.append(Arrival(prompt, SamplingParams(**settings), step, after))
    return arrivals
