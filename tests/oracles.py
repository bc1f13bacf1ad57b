"""What is right, computed another way: closed forms and brute force in float64.

Nothing here shares code with either side. Third-party implementations are used by the
tests themselves, straight from `transformers` and `mamba_ssm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.config import ModelConfig, MoeConfig, RotaryConfig
from lockstep.parameters import (
    AttentionParameters,
    LinearParameters,
    MambaParameters,
    MlpParameters,
    MoeParameters,
    Parameters,
)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension, in float64."""
    wide = hidden.double()
    mean_square = (wide**2).sum(-1, keepdim=True) / wide.shape[-1]
    return wide / (mean_square + eps).sqrt() * weight.double()


def gated_group_rms_norm(
    hidden: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int
) -> Tensor:
    """Gate, then norm group by group, in float64."""
    gated = hidden.double() * gate.double() / (1 + torch.exp(-gate.double()))
    parts = zip(gated.chunk(num_groups, 1), weight.chunk(num_groups), strict=True)
    return torch.cat([rms_norm(part, w, eps) for part, w in parts], dim=1)


def convolve(
    window: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve (tokens, channels) after a window (channels, width - 1), in float64."""
    history = torch.cat((window.double(), inputs.double().T), dim=1)[None]
    wide_bias = None if bias is None else bias.double()
    out = functional.conv1d(
        history, weight.double()[:, None], wide_bias, groups=len(weight)
    )
    return functional.silu(out[0].T)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    limit: tuple[float, float],
    initial: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return y and the last state by the matrix form: no recurrence, all in float64.

    ``y = (L * (C B^T)) (dt x) + exp(cumsum(dt A)) C h0 + D x``, with L the lower
    triangle of ``exp(sum of dt A between two tokens)``.

    Source: Dao & Gu 2024, "Transformers are SSDs", arXiv 2405.21060, eq. 16.
    """
    x, dt, B, C = x.double(), dt.double(), B.double(), C.double()
    heads, tokens = x.shape[1], len(x)
    group = torch.arange(heads) // (heads // B.shape[1])
    B, C = B[:, group], C[:, group]  # (tokens, heads, state)
    dt = torch.log1p(torch.exp(dt + dt_bias.double())).clamp(*limit)
    total = torch.cumsum(dt * A.double(), 0)  # (tokens, heads)
    between = total[:, None] - total[None]  # (to, from, heads)
    lower = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    decay = torch.where(lower[..., None], between, -torch.inf).exp()
    scores = torch.einsum("thn,shn->tsh", C, B) * decay
    y = torch.einsum("tsh,sh,shp->thp", scores, dt, x)
    y += torch.einsum("thn,hpn,th->thp", C, initial.double(), total.exp())
    y += D.double()[:, None] * x
    if not tokens:
        return y, initial.double()
    state = torch.einsum("sh,sh,shp,shn->hpn", decay[-1], dt, x, B)
    return y, state + total[-1].exp()[:, None, None] * initial.double()


def rotate(heads: Tensor, positions: Tensor, config: RotaryConfig) -> Tensor:
    """Turn heads (tokens, heads, head_dim) by multiplying complex numbers."""
    half = int(heads.shape[2] * config.part) // 2
    frequencies = torch.tensor([turn(config, i / half) for i in range(half)])
    angles = positions.double()[:, None, None] * frequencies.double()
    wide = heads.double()
    pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, wide[..., 2 * half :]), dim=2)


def turn(config: RotaryConfig, exponent: float) -> float:
    """Return the angle per position of one pair of channels."""
    angle = config.theta**-exponent
    if config.kind == "default":
        return angle
    if config.kind == "linear":
        return angle / config.factor
    wavelength, first = 2 * math.pi / angle, config.original_positions
    if wavelength < first / config.high_factor:
        return angle
    if wavelength > first / config.low_factor:
        return angle / config.factor
    low, high = config.low_factor, config.high_factor
    share = (first / wavelength - low) / (high - low)
    return (1 - share) * angle / config.factor + share * angle


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend causally; the last query is at the last key's position. In float64."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    out = torch.zeros_like(queries)
    heads_per_kv = queries.shape[1] // keys.shape[1]
    first = len(keys) - len(queries)
    for token in range(len(queries)):
        for head in range(queries.shape[1]):
            seen = slice(first + token + 1)
            k, v = keys[seen, head // heads_per_kv], values[seen, head // heads_per_kv]
            weights = torch.exp(k @ queries[token, head] * scale)
            out[token, head] = weights @ v / weights.sum()
    return out


def route(
    hidden: Tensor, router: Tensor, correction: Tensor | None, config: MoeConfig
) -> list[dict[int, float]]:
    """Choose experts by sorting (score, id) pairs; one dict of weights a token."""
    chosen: list[dict[int, float]] = []
    logits = hidden.double() @ router.double().T
    is_softmax = config.scoring == "softmax"
    by_token = torch.exp(logits) if is_softmax else 1 / (1 + torch.exp(-logits))
    added = [0.0] * config.num_experts if correction is None else correction.tolist()
    for scores in by_token.tolist():
        choice = [s + c for s, c in zip(scores, added, strict=True)]
        size = len(choice) // config.num_groups
        groups = [choice[g * size : (g + 1) * size] for g in range(config.num_groups)]
        by_score = sorted(
            range(config.num_groups),
            key=lambda g: (-sum(sorted(groups[g])[-2:]), g),  # noqa: B023
        )
        kept = by_score[: config.top_k_groups]
        eligible = [e for e in range(len(choice)) if e // size in kept]
        best = sorted(eligible, key=lambda e: (-choice[e], e))[: config.top_k]  # noqa: B023
        total = sum(scores[e] for e in best) if config.normalize_weights else 1.0
        chosen.append({e: scores[e] / total * config.scaling for e in sorted(best)})
    return chosen


def apply_experts(
    hidden: Tensor,
    dense_weights: Tensor,
    experts_up: Tensor,
    experts_down: Tensor,
    config: MoeConfig,
) -> Tensor:
    """Run every token through every expert, then weigh; in float64.

    Args:
        hidden: (tokens, inputs).
        dense_weights: (tokens, experts), zero where a token does not go.
        experts_up: (experts, size, inputs), or twice the size with a gate.
        experts_down: (experts, inputs, size).
        config: The activation, and whether it is gated.
    """
    inner = torch.einsum("ti,esi->tes", hidden.double(), experts_up.double())
    inner = activate(inner, config.activation, config.gated)
    outer = torch.einsum("tes,eis->tei", inner, experts_down.double())
    return torch.einsum("tei,te->ti", outer, dense_weights.double())


def activate(values: Tensor, activation: str, gated: bool = False) -> Tensor:
    """Apply an activation by its formula, in float64."""
    wide = values.double()
    if gated:
        half = wide.shape[-1] // 2
        return activate(wide[..., :half], activation) * wide[..., half:]
    if activation == "relu2":
        return torch.where(wide > 0, wide * wide, 0.0)
    if activation == "silu":
        return wide / (1 + torch.exp(-wide))
    return wide * 0.5 * (1 + torch.erf(wide / 2**0.5))


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's own integers.

    Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 % 2**32,
            (p0 >> 32) ^ c3 ^ k1,
            p0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def forward(config: ModelConfig, parameters: Parameters, tokens: list[int]) -> Tensor:
    """Compute the logits of one sequence with dense float64 operations."""
    residual = parameters.embedding[tokens].double() * config.embedding_multiplier
    functions: dict[type, Callable[..., Tensor]] = {
        MambaParameters: _mamba,
        AttentionParameters: _attention,
        MlpParameters: _mlp,
        MoeParameters: _moe,
    }
    for layer in parameters.layers:
        hidden = rms_norm(residual, layer.norm, config.norm_eps)
        update = functions[type(layer)](config, layer, hidden)
        residual = residual + update * config.residual_multiplier
    hidden = rms_norm(residual, parameters.final_norm, config.norm_eps)
    return hidden @ parameters.head.double().T / config.logit_divisor


def _linear(inputs: Tensor, parameters: LinearParameters) -> Tensor:
    outputs = inputs @ parameters.weight.double().T
    return outputs if parameters.bias is None else outputs + parameters.bias.double()


def _mamba(config: ModelConfig, layer: MambaParameters, hidden: Tensor) -> Tensor:
    mamba = config.mamba
    assert mamba is not None
    projected = _linear(hidden, layer.in_proj)
    inner, channels = mamba.inner_size, mamba.conv_channels
    gate, dt = projected[:, :inner], projected[:, inner + channels :]
    window = torch.zeros(channels, mamba.conv_window)
    convolved = convolve(
        window,
        projected[:, inner : inner + channels],
        layer.conv_weight,
        layer.conv_bias,
    )
    groups = (len(hidden), mamba.num_groups, mamba.state_size)
    B, C = convolved[:, inner:].chunk(2, 1)
    y, _ = selective_scan(
        convolved[:, :inner].reshape(len(hidden), mamba.num_heads, mamba.head_dim),
        dt,
        B.reshape(groups),
        C.reshape(groups),
        layer.A,
        layer.dt_bias,
        layer.D,
        mamba.time_step_limit,
        torch.zeros(mamba.num_heads, mamba.head_dim, mamba.state_size),
    )
    y, eps = y.reshape(len(hidden), inner), config.norm_eps
    normed = gated_group_rms_norm(y, gate, layer.gated_norm, eps, mamba.num_groups)
    return _linear(normed, layer.out_proj)


def _attention(
    config: ModelConfig, layer: AttentionParameters, hidden: Tensor
) -> Tensor:
    assert config.attention is not None
    queries, keys, values = (
        _linear(hidden, p).reshape(len(hidden), -1, config.attention.head_dim)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        queries = rms_norm(queries, layer.q_norm, config.norm_eps)
        keys = rms_norm(keys, layer.k_norm, config.norm_eps)
    if config.attention.rotary:
        positions = torch.arange(len(hidden))
        queries, keys = (
            rotate(x, positions, config.attention.rotary) for x in (queries, keys)
        )
    attended = attend(queries, keys, values, config.attention.score_scale)
    return _linear(attended.reshape(len(hidden), -1), layer.o_proj)


def _mlp(config: ModelConfig, layer: MlpParameters, hidden: Tensor) -> Tensor:
    assert config.mlp is not None
    mlp = config.mlp
    inner = activate(_linear(hidden, layer.up_proj), mlp.activation, mlp.gated)
    return _linear(inner, layer.down_proj)


def _moe(config: ModelConfig, layer: MoeParameters, hidden: Tensor) -> Tensor:
    moe = config.moe
    assert moe is not None
    dense = torch.zeros(len(hidden), moe.num_experts, dtype=torch.float64)
    chosen = route(hidden, layer.router, layer.correction, moe)
    for row, weights in zip(dense, chosen, strict=True):
        for expert, weight in weights.items():
            row[expert] = weight
    inputs = _linear(hidden, layer.latent_down) if layer.latent_down else hidden
    routed = apply_experts(inputs, dense, layer.experts_up, layer.experts_down, moe)
    routed = _linear(routed, layer.latent_up) if layer.latent_up else routed
    if layer.shared_up is None or layer.shared_down is None:
        return routed
    inner = activate(_linear(hidden, layer.shared_up), moe.activation, moe.gated)
    return routed + _linear(inner, layer.shared_down)
