"""The demo model's architecture, its fresh weights and its files."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedTokenizerFast,
)

# The scan chunk that the saved configuration names, and the one used in training:
# the result is the same, and longer chunks are faster as matrix products.
CHUNK = 16
TRAINING_CHUNK = 64

SIZES: dict[str, dict[str, Any]] = {
    "demo": {
        "hybrid_override_pattern": "M-M*MEM-M*E",
        "hidden_size": 256,
        "mamba_num_heads": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 640,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 256,
        "n_routed_experts": 8,
    },
    "small": {
        "hybrid_override_pattern": "M-M*ME",
        "hidden_size": 128,
        "mamba_num_heads": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 128,
        "n_routed_experts": 4,
    },
}

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    # The library clamps dt to at least time_step_min in its chunked form but not in
    # its one-token form; with a limit this low the two forms agree.
    "time_step_min": 1e-9,
    "time_step_max": 0.1,
    "max_position_embeddings": 4096,
    "rescale_prenorm_residual": True,
    "use_cache": True,
}

# The range from which each head's first time step is drawn.
TIME_STEPS = (1e-3, 0.1)


def build(size: str, vocabulary: int) -> NemotronHForCausalLM:
    """Return a freshly initialised model; the caller sets the seed."""
    config = NemotronHConfig(
        vocab_size=vocabulary,
        chunk_size=TRAINING_CHUNK,
        **COMMON,
        **SIZES[size],
    )
    model = NemotronHForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            _draw_time_steps(parameter)
    return model


@torch.no_grad()
def _draw_time_steps(bias: torch.nn.Parameter) -> None:
    """Fill a dt bias so that softplus(bias) is log-uniform in TIME_STEPS."""
    low, high = map(math.log, TIME_STEPS)
    steps = torch.exp(low + (high - low) * torch.rand(bias.shape))
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def rounded(model: NemotronHForCausalLM) -> dict[str, torch.Tensor]:
    """Return the weights in bfloat16; the routers' corrections stay float32."""
    return {
        name: value.detach().cpu()
        if name.endswith("e_score_correction_bias")
        else value.detach().to("cpu", torch.bfloat16)
        for name, value in model.state_dict().items()
    }


def save(
    model: NemotronHForCausalLM,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    """Write weights, configuration and tokenizer in the ordinary format."""
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        max_new_tokens=200,
    )
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    # The library writes down the live model's chunk and type, not the file's.
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"chunk_size": CHUNK, "dtype": "bfloat16"}
    path.write_text(json.dumps(fields, indent=2) + "\n")
