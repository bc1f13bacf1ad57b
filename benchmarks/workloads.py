"""The workloads that every engine is measured on: prompts of token ids, and lengths.

Each is deterministic, from a linear generator that any engine can rebuild. Sampling is
greedy, end tokens are ignored, and exactly ``max_tokens`` tokens are made of each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Prompts to serve together.

    Attributes:
        name: How results call it.
        prompts: Token ids of each prompt.
        max_tokens: Tokens to generate for each.
        warm: Whether the shared prefix is cached before timing, by one request with
            another suffix.
        note: What it stands for.
    """

    name: str
    prompts: list[list[int]]
    max_tokens: int
    warm: bool = False
    note: str = ""


def tokens(seed: int, count: int, vocab: int = 131072) -> list[int]:
    """Draw token ids from 10 up, by a linear congruential generator."""
    state = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    drawn: list[int] = []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        drawn.append(10 + (state >> 8) % (vocab - 10))
    return drawn


def build(seed: int = 0) -> list[Workload]:
    """Make all workloads; other seeds give other tokens of the same lengths."""
    first = seed * 1000003

    def many(offset: int, count: int, length: int) -> list[list[int]]:
        return [tokens(first + offset + row, length) for row in range(count)]

    shared = tokens(first + 3000, 4096)
    ragged = [tokens(first + 4000 + i, 64 + (i * 137) % 1900) for i in range(64)]
    return [
        Workload("decode_b1", many(1, 1, 128), 256, note="one stream"),
        Workload("decode_b32", many(100, 32, 128), 256),
        Workload("decode_b256", many(500, 256, 128), 128),
        Workload("ttft_512", many(900, 1, 512), 1, note="time to first token"),
        Workload("prefill_16x2048", many(1000, 16, 2048), 1),
        Workload("prefill_128x256", many(2000, 128, 256), 1),
        Workload(
            "shared_prefix_32",
            [shared + suffix for suffix in many(3100, 32, 128)],
            16,
            warm=True,
            note="4,096 shared tokens, 128 of their own",
        ),
        Workload("mixed_64", ragged, 32, note="decode and prefill overlap"),
    ]
