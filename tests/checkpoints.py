"""Checkpoints for tests, saved by `transformers` itself."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

#: A tiny dense model. ``time_step_min`` is as good as zero: `transformers` takes it for
#: the lower limit of the time steps, in one of its two forms.
BASE: dict[str, Any] = {
    "hybrid_override_pattern": "M-M*-",
    "vocab_size": 96,
    "hidden_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-9,
}
_MODEL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
#: A tiny model of each family, by ``model_type``.
BASES: dict[str, dict[str, Any]] = {
    "nemotron_h": BASE,
    "bamba": {
        **_MODEL,
        **_ATTENTION,
        **_MAMBA,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
    },
    "granitemoehybrid": {
        **_MODEL,
        **_ATTENTION,
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    },
    "mamba2": {
        "vocab_size": 96,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 12,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "llama": {**_MODEL, **_ATTENTION, "num_hidden_layers": 3},
    "qwen3": {**_MODEL, **_ATTENTION, "num_hidden_layers": 3, "head_dim": 16},
}
#: What makes it a mixture of experts.
MOE: dict[str, Any] = {
    "hybrid_override_pattern": "MEM*EM-E",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}


def log_uniform(values: Tensor, low: float, high: float) -> Tensor:
    """Draw between two limits, uniformly in the logarithm."""
    return values.uniform_(math.log(low), math.log(high)).exp_()


@torch.no_grad()
def draw_witness(model: PreTrainedModel, seed: int) -> None:
    """Draw weights under which no state, bias or correction is without effect."""
    torch.manual_seed(seed)
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        if name.endswith("A_log"):
            log_uniform(values, 0.01, 2.0).log_()
        elif name.endswith("dt_bias"):
            step = log_uniform(values, 0.1, 1.0)
            values.copy_(step + torch.log(-torch.expm1(-step)))
        elif name.endswith("D"):
            values.normal_(0.0, 0.1)
        elif name.endswith(("norm.weight", "norm_f.weight")):
            values.normal_(1.0, 0.1)
        elif name.endswith("bias"):
            values.normal_(0.0, 0.1)
        else:
            values.normal_(0.0, values.shape[-1] ** -0.5)


def save(folder: Path, fields: dict[str, Any], seed: int = 0, **options: Any) -> Path:
    """Let `transformers` save a checkpoint of random weights.

    Args:
        folder: Where to.
        fields: What is not as in the base of its family, which is ``nemotron_h`` unless
            ``model_type`` says another.
        seed: Key of the weights.
        options: For `transformers`.
    """
    family = fields.get("model_type", "nemotron_h")
    # The library writes into the tables of rotary options that it is given.
    fields = deepcopy({"model_type": family, **BASES[family], **fields})
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config)
    draw_witness(model, seed)
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Change a saved config."""
    path = folder / "config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove}
    path.write_text(json.dumps(kept | fields))
