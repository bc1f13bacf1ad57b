"""Model shapes that are measured, as the fields of Hugging Face configs.

Weights are drawn at random, on the device (`lockstep.weights.RandomWeights`).
"""

from __future__ import annotations

import math
from typing import Any

_COMMON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "use_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "ssm_state_size": 128,
    "n_groups": 8,
    "mamba_head_dim": 64,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "time_step_limit": [0.0, math.inf],
    "time_step_floor": 1e-4,
    "time_step_min": 1e-3,
    "time_step_max": 0.1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_mamba_kernels": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_ssm_cache_dtype": "float32",
}

#: The published shape of NVIDIA Nemotron 3 Nano 30B-A3B: 23 Mamba-2, 23 MoE and 6
#: attention layers.
NANO3: dict[str, Any] = _COMMON | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

#: A dense hybrid of 3.75 billion parameters, in the proportions of Nemotron-H.
DENSE4B: dict[str, Any] = _COMMON | {
    "hidden_size": 3072,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M*-M-",
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_num_heads": 112,
    "intermediate_size": 12288,
}

SHAPES = {"nano3": NANO3, "dense4b": DENSE4B}

#: The published shape of IBM Granite 4.0 H 350M, a dense hybrid of 0.34 billion
#: parameters: 28 Mamba-2 and 4 attention layers, each with an MLP. Sizes are those of
#: ``config.json`` in ``ibm-granite/granite-4.0-h-350m`` on Hugging Face.
GRANITE_350M: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "layer_types": [
        "attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)
    ],
    "max_position_embeddings": 32768,
    "position_embedding_type": "nope",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "num_local_experts": 0,
    "shared_intermediate_size": 2048,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.246,
    "logits_scaling": 3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
