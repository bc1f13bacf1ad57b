"""Published configs give the published models, and the memory plan knows their kind.

Numbers of parameters are those of the library's own models, made without memory, and
for some also those that their makers state.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep import LLM, EngineConfig
from lockstep.config import ModelConfig, RotaryConfig
from lockstep.errors import ConfigError
from lockstep.families import FAMILIES, read_model_config
from lockstep.memory import plan_memory
from lockstep.parameters import num_parameters
from tests.checkpoints import BASES
from tests.engines import greedy
from tests.factories import CPU

GRANITE_TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if n % 10 == 5 else "mamba" for n in range(40)],
    "max_position_embeddings": 131072,
    "position_embedding_type": "nope",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "logits_scaling": 6,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "granite-4.0-h-tiny": GRANITE_TINY,
    "granite-4.0-h-small": {
        **GRANITE_TINY,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
    },
    "Bamba-9B": {
        "model_type": "bamba",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "Mamba-Codestral-7B": {
        "model_type": "mamba2",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "chunk_size": 256,
        "expand": 2,
        "conv_kernel": 4,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
#: What their makers state.
STATED = {
    "Mamba-Codestral-7B": 7_285_403_648,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-0.6B": 596_049_920,
}
#: The tiny models of each family.
TINY = {name: {"model_type": name, **fields} for name, fields in BASES.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name: str) -> None:
    """As many as the library's own model has, tied ones counted once."""
    fields = {**PUBLISHED[name]}
    count = num_parameters(read_model_config(fields))
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert count == sum(values.numel() for values in model.parameters())
    assert count == STATED.get(name, count)


def read(name: str, **changes: Any) -> ModelConfig:
    """Read a published config with some fields changed."""
    return read_model_config({**PUBLISHED[name], **changes})


def test_layers_of_two() -> None:
    """A decoder layer is a mixer and what follows; experts only where there are any."""
    tiny = read("granite-4.0-h-tiny")
    assert tiny.layer_pattern[:14] == "ME" * 5 + "*E" + "ME"
    assert len(tiny.layer_pattern) == 80
    for none in (0, None):
        dense = read("granite-4.0-h-tiny", num_local_experts=none)
        assert dense.layer_pattern == tiny.layer_pattern.replace("E", "-")
        assert dense.mlp is not None
        assert (dense.mlp.size, dense.mlp.gated) == (1024, True)
    bamba = read("Bamba-9B").layer_pattern
    assert [n for n in range(32) if bamba[2 * n] == "*"] == [9, 18, 27]
    assert bamba[1::2] == "-" * 32
    assert read("Mamba-Codestral-7B").layer_pattern == "M" * 64
    assert read("Qwen3-0.6B").layer_pattern == "*-" * 28


def test_options_reach_the_config() -> None:
    """Every option of these families lands in its place."""
    granite = read("granite-4.0-h-tiny")
    assert granite.attention and granite.mamba and granite.moe
    assert granite.attention.rotary is None
    assert granite.attention.score_scale == 0.0078125
    assert (granite.embedding_multiplier, granite.residual_multiplier) == (12, 0.22)
    assert (granite.logit_divisor, granite.moe.scoring) == (6, "softmax")
    mamba = read("Mamba-Codestral-7B")
    assert mamba.mamba
    assert mamba.mamba.num_groups == 8
    assert mamba.float32_residual
    assert not read("Mamba-Codestral-7B", residual_in_fp32=False).float32_residual
    qwen, bamba = read("Qwen3-0.6B"), read("Bamba-9B")
    assert qwen.attention and bamba.attention and bamba.mamba
    assert qwen.attention.qk_norm
    assert qwen.attention.rotary == RotaryConfig(1000000, original_positions=40960)
    assert bamba.attention.rotary
    assert bamba.attention.rotary.size(bamba.attention.head_dim) == 64
    assert bamba.mamba.head_dim == 64


LLAMA3 = RotaryConfig(500000.0, 1.0, "llama3", 32.0, 1.0, 4.0, 8192)


def test_spellings_of_rotary_options() -> None:
    """Two fields, or one table with everything in it."""
    llama = read("Llama-3.2-1B")
    assert llama.attention
    assert llama.attention.rotary == LLAMA3
    table = {**PUBLISHED["Llama-3.2-1B"]["rope_scaling"], "rope_theta": 500000.0}
    changes = {"rope_theta": None, "rope_scaling": None, "rope_parameters": table}
    assert read("Llama-3.2-1B", **changes) == llama
    older = read("Llama-3.2-1B", rope_scaling={"type": "linear", "factor": 2.0})
    assert older.attention and older.attention.rotary
    assert (older.attention.rotary.kind, older.attention.rotary.factor) == ("linear", 2)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "yarn": (
        "Qwen3-0.6B",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope.rope_type='yarn'.*'default' or 'linear' or 'llama3'",
    ),
    "rotary by layer": (
        "Qwen3-0.6B",
        {"rope_parameters": {"full_attention": {"rope_theta": 10000.0}}},
        "rope_parameters=.*one table for all layers",
    ),
    "rotary by name": (
        "Qwen3-0.6B",
        {"rope_scaling": "linear"},
        "rope_parameters='linear' is not implemented",
    ),
    "sliding window": (
        "Qwen3-0.6B",
        {"use_sliding_window": True, "sliding_window": 4096},
        "use_sliding_window=True",
    ),
    "sliding layers": (
        "Qwen3-0.6B",
        {"layer_types": ["sliding_attention"] * 28},
        "sliding_attention",
    ),
    "window": ("Llama-3.2-1B", {"sliding_window": 512}, "sliding_window=512"),
    "part": ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "positions": (
        "granite-4.0-h-tiny",
        {"position_embedding_type": "alibi"},
        "position_embedding_type='alibi'",
    ),
    "activation": ("Bamba-9B", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "not a number": (
        "Llama-3.2-1B",
        {"rope_theta": "big", "rope_scaling": None},
        "rope_theta is 'big'; it must be a number",
    ),
    "not whole": ("Bamba-9B", {"mamba_expand": 1.5}, "mamba_expand is 1.5.*whole"),
    "no depth": ("Qwen3-0.6B", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
    "odd part": (
        "Bamba-9B",
        {"rope_parameters": {"partial_rotary_factor": 0.04}},
        "5 channels of a head cannot be turned in pairs",
    ),
    "factors": (
        "Llama-3.2-1B",
        {
            "rope_scaling": {
                **PUBLISHED["Llama-3.2-1B"]["rope_scaling"],
                "high_freq_factor": 1.0,
            }
        },
        "high_factor is 1.0; it must be above low_factor",
    ),
    "theta": (
        "Llama-3.2-1B",
        {"rope_theta": 0, "rope_scaling": None},
        "theta is 0; it must be above 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What is not implemented, or makes no sense, is refused by name."""
    base, changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read(base, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights(family: str) -> None:
    """Any shape can be drawn, and runs."""
    llm = LLM.from_config(
        TINY[family], device="cpu", verbose=False, max_requests=2, num_blocks=9
    )
    output = llm.generate([list(range(9))], greedy(3))[0]
    assert len(output.token_ids) == 3


def test_attention_alone_needs_no_state() -> None:
    """Slots take no memory, and snapshots asked for in vain are told of."""
    fields = {**TINY["llama"], "max_position_embeddings": 512}
    llm = LLM.from_config(fields, device="cpu", verbose=False)
    assert llm.sizes.bytes_per_slot == llm.sizes.snapshot_slots == 0
    assert llm.sizes.block_size == 128
    assert not any(pool.numel() for pool in llm.engine.caches.tensors()[1:])
    with pytest.warns(UserWarning, match="7 snapshot slots.*no Mamba layers"):
        LLM.from_config(fields, device="cpu", verbose=False, snapshot_slots=7)


def test_mamba_alone_needs_no_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks take no memory, however many there are; states still have to fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM.from_config(TINY["mamba2"], device="cpu", num_blocks=1000)
    assert llm.sizes.bytes_per_block == 0
    assert llm.engine.caches.kv.numel() == 0
    assert llm.sizes.snapshot_slots > 0
    assert "K/V blocks   no memory" in capsys.readouterr().err
    config = read_model_config(TINY["mamba2"])
    engine = EngineConfig(memory_fraction=1e-6)
    with pytest.raises(ConfigError, match="fits: of .* state slots"):
        plan_memory(config, engine, CPU, torch.float32)


def test_scan_chunks() -> None:
    """The checkpoint's, of 16 to 256 tokens, and no other."""
    for chunk in (16, 64, 256):
        config = read("Bamba-9B", mamba_chunk_size=chunk)
        sizes = plan_memory(config, EngineConfig(num_blocks=1), CPU, torch.float32)
        assert sizes.scan_chunk_size == sizes.block_size == chunk
    with pytest.raises(ConfigError, match="scan_chunk_size is 512"):
        config = read("Bamba-9B", mamba_chunk_size=512)
        plan_memory(config, EngineConfig(num_blocks=1), CPU, torch.float32)
    assert math.isinf(read("Bamba-9B").mamba.time_step_limit[1])  # type: ignore[union-attr]
