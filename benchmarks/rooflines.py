"""The floor of each workload: the least time that it can take, on one H200 by default.

Bytes and operations are counted once, at the best rates that any kernel has reached on
the machine. A workload's floor is the sum over its steps of the larger of the time for
its bytes and that for its operations: prefill in steps of at most 8,192 tokens, after
which all requests of the batch decode together. (For ``mixed_64`` that is a model and
no floor: rows that decode within steps of 2,048 prefill tokens come to 0.80 s for nano3
and 0.53 s for dense4b.) Distinct experts are counted as for independent, uniform
routing. A measurement under the floor is a fault in the floor.

    python -m benchmarks.rooflines
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, build
from lockstep.config import ModelConfig
from lockstep.families import read_model_config

#: Prefill tokens of a step.
STEP_TOKENS = 8192


class Rates(NamedTuple):
    """The best that a machine does.

    Attributes:
        read: Bytes a second of a matrix-vector product, which reads weights.
        copy: Bytes a second of a copy, reads and writes counted.
        flops: Operations a second of a large matrix product.
    """

    read: float
    copy: float
    flops: float


#: Of one H200, its products in bfloat16.
H200 = Rates(4.42e12, 4.30e12, 790e12)


def choose_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return a machine's rates: those known of an H200 in 16 bits, others measured."""
    if device.type == "cuda" and dtype.itemsize == 2:
        # A word of its own: a GH200 is another machine.
        if "H200" in torch.cuda.get_device_name(device).split():
            return H200
    return measure_rates(device, dtype)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure a machine's rates, each as the best of several runs."""
    # On a GPU so much that neither its cache nor the start of a kernel counts.
    size, rows = (2**13, 2**12) if device.type == "cuda" else (2**10, 2**8)
    square = torch.ones(size, size, dtype=dtype, device=device)
    matrix = torch.ones(rows, 2**16, dtype=dtype, device=device)
    target, vector = torch.empty_like(matrix), matrix[0]

    def copy() -> Tensor:
        return torch.mul(matrix, 1, out=target)

    return Rates(
        read=matrix.nbytes / _best_seconds(lambda: matrix.mv(vector), device),
        copy=2 * matrix.nbytes / _best_seconds(copy, device),
        flops=2 * size**3 / _best_seconds(lambda: square.mm(square), device),
    )


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of ten runs."""
    times: list[float] = []
    for _ in range(10):
        begin = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - begin)
    return min(times)


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
        scan_flops: Operations of the recurrence for one token, all layers.
        chunk_flops: What the scan of a prefill computes besides, within chunks.
        attention_flops: Operations of attention for one token and position.
        num_bytes: Bytes of a weight.
    """

    dense: int
    head: int
    expert: int
    num_experts: int
    top_k: int
    num_moe: int
    state_bytes: int
    kv_bytes: int
    scan_flops: int
    chunk_flops: int
    attention_flops: int
    num_bytes: int = 2


def count(config: ModelConfig, num_bytes: int = 2) -> Counts:
    """Count what a model's steps are made of.

    Args:
        config: The model.
        num_bytes: Bytes of a number of weights, K/V and conv windows.
    """
    hidden, pattern = config.hidden_size, config.layer_pattern
    num = {letter: pattern.count(letter) for letter in "M*-E"}
    mamba = attention = mlp = shared = expert = state = kv = scan = chunk = pairs = 0
    if config.mamba is not None:
        m = config.mamba
        mamba = hidden * (m.inner_size + m.conv_channels + m.num_heads)
        mamba += m.inner_size * hidden
        state = m.inner_size * m.state_size * 4
        state += m.conv_channels * (m.conv_window + 1) * num_bytes
        # States are written and read once; within a chunk half of the pairs count.
        scan = 4 * m.inner_size * m.state_size
        chunk = m.num_heads * m.scan_chunk_size * (m.state_size + m.head_dim)
    if config.attention is not None:
        a = config.attention
        attention = hidden * (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        kv = 2 * a.num_kv_heads * a.head_dim * num_bytes
        pairs = 4 * a.num_heads * a.head_dim
    if config.mlp is not None:
        mlp = (2 + config.mlp.gated) * hidden * config.mlp.size
    moe = config.moe
    if moe is not None:
        width = moe.latent_size or hidden
        shared = (2 + moe.gated) * hidden * moe.shared_size
        shared += 2 * hidden * (moe.latent_size or 0)
        expert = (2 + moe.gated) * width * moe.expert_size
    experts = moe.num_experts if moe else 0
    return Counts(
        dense=num["M"] * mamba
        + num["*"] * attention
        + num["-"] * mlp
        + num["E"] * (hidden * experts + shared),
        head=hidden * config.vocab_size,
        expert=expert,
        num_experts=experts,
        top_k=moe.top_k if moe else 0,
        num_moe=num["E"],
        state_bytes=num["M"] * state,
        kv_bytes=num["*"] * kv,
        scan_flops=num["M"] * scan,
        chunk_flops=num["M"] * chunk,
        attention_flops=num["*"] * pairs,
        num_bytes=num_bytes,
    )


def step_seconds(
    c: Counts,
    tokens: float,
    rows: float,
    context: float,
    samples: float,
    rates: Rates = H200,
) -> float:
    """Return the floor of one step.

    Args:
        c: The shape's counts.
        tokens: Tokens computed.
        rows: Requests.
        context: Positions attended to, over all rows.
        samples: Tokens whose logits are computed.
        rates: The machine's.
    """
    touched = 0.0
    if c.num_experts:
        touched = c.num_experts * (1 - (1 - c.top_k / c.num_experts) ** tokens)
    weights = c.dense + c.num_moe * touched * c.expert + c.head
    read = (c.num_bytes * weights + context * c.kv_bytes) / rates.read
    copied = 2 * rows * c.state_bytes / rates.copy
    flops = 2 * tokens * (c.dense + c.num_moe * c.top_k * c.expert)
    is_decode = tokens == rows
    scan = c.scan_flops + (0 if is_decode else c.chunk_flops)
    flops += 2 * samples * c.head + tokens * scan
    pairs = context if is_decode else context * tokens / max(rows, 1) / 2
    flops += c.attention_flops * pairs
    return max(read + copied, flops / rates.flops)


def floor_seconds(shape: str, workload: Workload) -> float:
    """Return the floor of a workload on a shape, on one H200."""
    return floor_of(count(read_model_config(SHAPES[shape])), workload)


def floor_of(counts: Counts, workload: Workload, rates: Rates = H200) -> float:
    """Return the floor of a workload on what a model is made of."""
    lens, rows = [len(prompt) for prompt in workload.prompts], len(workload.prompts)
    skipped = 4096 if workload.warm else 0
    todo = sum(length - skipped for length in lens)
    steps = math.ceil(todo / STEP_TOKENS)
    total = steps * step_seconds(
        counts, todo / steps, rows / steps, sum(lens) / steps, rows / steps, rates
    )
    for token in range(1, workload.max_tokens):
        context = sum(lens) + rows * token
        total += step_seconds(counts, rows, rows, context, rows, rates)
    return total


if __name__ == "__main__":
    for name in SHAPES:
        for each in build(0):
            print(f"{name:8} {each.name:18} {floor_seconds(name, each):.4f} s")
