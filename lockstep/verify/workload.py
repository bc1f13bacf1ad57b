"""Workloads: requests, when they arrive, and how many may be drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)
#: Vocabulary of which prompts are drawn.
VOCAB = 61
#: Blocks that prompts are made of. Two read alike where digits are run together, and
#: each may follow any other, so that equal blocks have different pasts.
BLOCKS = ([1, 11] * 8, [11, 1] * 8, list(range(20, 36)), [7, 3, 58, 40] * 4)
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


@dataclass(frozen=True)
class Arrival:
    """A request of a workload.

    Attributes:
        prompt: Token ids, taken modulo the vocabulary.
        sampling: How tokens are drawn.
        step: First step in which it may arrive.
        after: Number of an earlier arrival that must have ended; its prompt and its
            tokens then come before this prompt, as in the next turn of a chat.
    """

    prompt: Sequence[int]
    sampling: SamplingParams = GREEDY
    step: int = 0
    after: int | None = None


@dataclass(frozen=True)
class Workload:
    """What both engines are given.

    Attributes:
        arrivals: Requests, named ``r0``, ``r1`` and so on.
        options: Options of `EngineConfig`, in place of those of `SMALL`.
        before: Called with each engine and the step's number before each step, when
            requests have arrived; may do anything. What it returns is compared.
    """

    arrivals: Sequence[Arrival]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    before: Callable[[Any, int], Any] | None = None


def draw_arrivals(
    count: int, seed: int, stems: int = len(BLOCKS), pause: int = 3
) -> Sequence[Arrival]:
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
        path = [draw.choice(BLOCKS[-stems:]) for _ in range(draw.randrange(4))]
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
