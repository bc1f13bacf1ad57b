"""Tiny models that witness: a wrong state or block shows in their log-probabilities."""

from __future__ import annotations

from dataclasses import replace

from lockstep.config import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)

#: The smallest model with both kinds of cache.
_SMALL = ModelConfig(
    family="tiny",
    layer_pattern="M*",
    vocab_size=29,
    hidden_size=16,
    max_positions=256,
    eos_token_ids=(28,),
    mamba=MambaConfig(
        num_heads=2, head_dim=4, state_size=4, num_groups=1, scan_chunk_size=16
    ),
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
    mlp=MlpConfig(size=12),
    moe=MoeConfig(num_experts=4, top_k=2, expert_size=6, shared_size=6),
)
_MODELS = {"small": _SMALL, "all kinds": replace(_SMALL, layer_pattern="M*-EM")}
MODEL_NAMES = tuple(_MODELS)


def model_config(name: str) -> ModelConfig:
    """Return a model of the random traces by name."""
    return _MODELS[name]
