"""The floor of each workload: the least time that it can take on one H200.

Bytes and operations are counted once, at the best rates that any kernel has reached on
the card. A workload's floor is the sum over its steps of the larger of the time for its
bytes and that for its operations: prefill in steps of at most 8,192 tokens, after which
all requests of the batch decode together. (For ``mixed_64`` that is a model and no
floor: rows that decode within steps of 2,048 prefill tokens come to 0.80 s for nano3
and 0.53 s for dense4b.) Distinct experts are counted as for independent, uniform
routing. A measurement under the floor is a fault in the floor.

    python -m benchmarks.rooflines
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, build

#: Bytes a second of a matrix-vector product, which reads weights.
READ_RATE = 4.42e12
#: Bytes a second of a copy, reads and writes counted.
COPY_RATE = 4.30e12
#: Operations a second of a large bfloat16 matrix product.
FLOP_RATE = 790e12
#: Prefill tokens of a step.
STEP_TOKENS = 8192


class Counts(NamedTuple):
    """What a step of a shape reads and computes, in numbers of weights and bytes.

    Attributes:
        dense: Weights that every token meets, over all layers, without the head.
        head: Weights of the head.
        expert: Weights of one routed expert of one layer.
        num_experts: Routed experts of a layer.
        top_k: Experts that a token visits.
        num_moe: Layers with experts.
        state_bytes: State of one request, all layers: SSM states and conv windows.
        kv_bytes: K/V of one token, all layers.
        scan_flops: Operations of the scan for one token, all layers.
        attention_flops: Operations of attention for one token and position.
    """

    dense: int
    head: int
    expert: int
    num_experts: int
    top_k: int
    num_moe: int
    state_bytes: int
    kv_bytes: int
    scan_flops: float
    attention_flops: int


def count(fields: dict[str, Any]) -> Counts:
    """Count what a shape's steps are made of; weights and K/V have two bytes."""
    hidden, pattern = fields["hidden_size"], fields["hybrid_override_pattern"]
    num = {letter: pattern.count(letter) for letter in "M*-E"}
    head_dim, heads = fields["head_dim"], fields["num_attention_heads"]
    kv_heads = fields["num_key_value_heads"]
    mamba_heads, mamba_dim = fields["mamba_num_heads"], fields["mamba_head_dim"]
    state, groups = fields["ssm_state_size"], fields["n_groups"]
    inner = mamba_heads * mamba_dim
    channels = inner + 2 * groups * state
    experts = fields.get("n_routed_experts", 0)
    shared = 2 * hidden * fields.get("moe_shared_expert_intermediate_size", 0)
    mamba = hidden * (inner + channels + mamba_heads) + inner * hidden
    attention = hidden * (2 * heads + 2 * kv_heads) * head_dim
    # Within a chunk of 128 half of the pairs count; states are written and read once.
    scan = mamba_heads * (128 * (state + mamba_dim) + 4 * mamba_dim * state)
    return Counts(
        dense=num["M"] * mamba
        + num["*"] * attention
        + num["-"] * 2 * hidden * fields.get("intermediate_size", 0)
        + num["E"] * (hidden * experts + shared),
        head=hidden * fields["vocab_size"],
        expert=2 * hidden * fields.get("moe_intermediate_size", 0),
        num_experts=experts,
        top_k=fields.get("num_experts_per_tok", 0),
        num_moe=num["E"],
        state_bytes=num["M"] * (mamba_heads * mamba_dim * state * 4 + channels * 8),
        kv_bytes=num["*"] * 2 * kv_heads * head_dim * 2,
        scan_flops=num["M"] * scan,
        attention_flops=4 * num["*"] * heads * head_dim,
    )


def step_seconds(
    c: Counts, tokens: float, rows: float, context: float, samples: float
) -> float:
    """Return the floor of one step.

    Args:
        c: The shape's counts.
        tokens: Tokens computed.
        rows: Requests.
        context: Positions attended to, over all rows.
        samples: Tokens whose logits are computed.
    """
    touched = 0.0
    if c.num_experts:
        touched = c.num_experts * (1 - (1 - c.top_k / c.num_experts) ** tokens)
    weights = c.dense + c.num_moe * touched * c.expert + c.head
    read = (2 * weights + context * c.kv_bytes) / READ_RATE
    copied = 2 * rows * c.state_bytes / COPY_RATE
    flops = 2 * tokens * (c.dense + c.num_moe * c.top_k * c.expert)
    flops += 2 * samples * c.head + tokens * c.scan_flops
    is_decode = tokens == rows
    pairs = context if is_decode else context * tokens / max(rows, 1) / 2
    flops += c.attention_flops * pairs
    return max(read + copied, flops / FLOP_RATE)


def floor_seconds(shape: str, workload: Workload) -> float:
    """Return the floor of a workload on a shape."""
    counts = count(SHAPES[shape])
    lens, rows = [len(prompt) for prompt in workload.prompts], len(workload.prompts)
    skipped = 4096 if workload.warm else 0
    todo = sum(length - skipped for length in lens)
    steps = math.ceil(todo / STEP_TOKENS)
    total = steps * step_seconds(
        counts, todo / steps, rows / steps, sum(lens) / steps, rows / steps
    )
    for token in range(1, workload.max_tokens):
        total += step_seconds(counts, rows, rows, sum(lens) + rows * token, rows)
    return total


if __name__ == "__main__":
    for name in SHAPES:
        for each in build(0):
            print(f"{name:8} {each.name:18} {floor_seconds(name, each):.4f} s")
