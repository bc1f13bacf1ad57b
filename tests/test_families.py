"""Configs in every spelling, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import ModelConfig
from lockstep.errors import CheckpointError, ConfigError, UnsupportedModelError
from lockstep.families import (
    FAMILIES,
    decay_rate,
    filter_taps,
    read_config_files,
    read_model_config,
)
from lockstep.parameters import num_parameters, parameter_specs

TINY: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-E*",
    "vocab_size": 64,
    "hidden_size": 32,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}

#: The published Nemotron 3 Nano 30B-A3B, which has 31.6 billion parameters.
NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "vocab_size": 131072,
    "hidden_size": 2688,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def read(**changes: Any) -> ModelConfig:
    """Read the tiny config with some fields changed; None removes one."""
    fields = {**TINY, **changes}
    return read_model_config({k: v for k, v in fields.items() if v is not None})


def test_published_shape() -> None:
    """A published config gives the published number of parameters."""
    config = read_model_config(NANO)
    assert num_parameters(config) == 31_577_940_288
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,)
    assert config.moe is not None
    assert config.moe.scaling == 2.5


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_block_type": ["linear_attention", "mlp", "moe", "full_attention"]},
        {"layer_types": ["mamba", "mlp", "moe", "attention"]},
        {"layers_block_type": ["mamba", "mlp", "moe", "attention"]},
    ],
)
def test_spellings_of_the_pattern(changes: dict[str, Any]) -> None:
    """Lists of names say the same as letters."""
    assert read(hybrid_override_pattern=None, **changes) == read()


def test_a_list_of_layers_goes_before_letters() -> None:
    """As in `transformers`, where both are given."""
    names = ["mlp", "linear_attention"]
    assert read(layers_block_type=names).layer_pattern == "-M"


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("n_groups", "mamba_n_groups", 4),
        ("conv_kernel", "mamba_d_conv", 3),
        ("use_conv_bias", "mamba_conv_bias", False),
        ("chunk_size", "mamba_chunk_size", 64),
        ("time_step_limit", "mamba_dt_limit", [0.1, 0.5]),
        ("norm_eps", "layer_norm_epsilon", 1e-3),
        ("torch_dtype", "dtype", "bfloat16"),
        ("dtype", "dtype", "torch.bfloat16"),
        ("n_routed_experts", "num_local_experts", 8),
        ("head_dim", "attention_head_dim", 4),
    ],
)
def test_spellings_of_fields(old: str, new: str, value: Any) -> None:
    """Both names of a field are read, and change something."""
    plain = str(value).removeprefix("torch.") if isinstance(value, str) else value
    first = read(**{old: plain})
    assert first == read(**{old: None, new: value})
    assert first != read()


@pytest.mark.parametrize("high", [math.inf, {"__float__": "Infinity"}, "inf"])
def test_spellings_of_infinity(high: Any) -> None:
    """Infinity as JSON's extension, and as `transformers` writes it."""
    mamba = read(time_step_limit=[0.0, high]).mamba
    assert mamba is not None
    assert mamba.time_step_limit == (0.0, math.inf)


def test_options_reach_the_config() -> None:
    """Every option of the family lands in its place."""
    config = read(
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        moe_latent_size=12,
        mlp_hidden_act="silu",
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=[2, 3],
    )
    assert config.mamba is not None
    assert (config.mamba.proj_bias, config.mamba.conv_bias) == (True, False)
    assert config.mlp is not None
    assert (config.mlp.bias, config.mlp.activation) == (True, "silu")
    assert config.moe is not None
    assert config.moe.bias
    assert (config.moe.num_groups, config.moe.top_k_groups) == (2, 1)
    assert not config.moe.normalize_weights
    assert config.moe.latent_size == 12
    assert config.tie_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3))


def test_shapes_of_absent_layers_are_not_asked_for() -> None:
    """A model without experts need not say how large they would be."""
    fields = {k: v for k, v in TINY.items() if "moe" not in k and "expert" not in k}
    config = read_model_config({**fields, "hybrid_override_pattern": "M*-"})
    assert config.moe is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "gpt2"}, "'gpt2' is not implemented.*nemotron_h"),
    "no family": ({"model_type": None}, "None is not implemented.*nemotron_h"),
    "sliding window": ({"sliding_window": 4096}, "sliding_window=4096"),
    "attention bias": ({"attention_bias": True}, "attention_bias=True"),
    "projection bias": ({"mamba_proj_bias": True}, "mamba_proj_bias=True"),
    "residual": ({"residual_in_fp32": True}, "residual_in_fp32=True"),
    "shared experts": ({"n_shared_experts": 2}, "n_shared_experts=2"),
    "activation": ({"mlp_hidden_act": "tanh"}, "mlp_hidden_act='tanh'"),
    "mamba activation": ({"mamba_hidden_act": "relu"}, "mamba_hidden_act='relu'"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config="),
    "layer letter": ({"hybrid_override_pattern": "M|*"}, r"\['\|'\]"),
    "layer name": ({"layers_block_type": ["mamba", "conv"]}, r"\['conv'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What is not implemented is refused by name."""
    changes, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"hidden_size": None}, "lacks hidden_size"),
    "not a number": ({"vocab_size": "many"}, "vocab_size is 'many'"),
    "a list": ({"intermediate_size": [8, 8]}, r"intermediate_size is \[8, 8\]"),
    "no pattern": ({"hybrid_override_pattern": None}, "hybrid_override_pattern"),
    "depth": ({"num_hidden_layers": 5}, "num_hidden_layers is 5.*4 layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    """A field that is missing or makes no sense is named."""
    changes, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", 2.5),
        ("time_step_limit", 5),
        ("time_step_limit", ["a", "b"]),
        ("layers_block_type", [["a"]]),
    ],
)
def test_damaged(field: str, value: Any) -> None:
    """A field of the wrong kind is an error of the config, not of Python."""
    with pytest.raises(ConfigError, match="a field of this config cannot be used"):
        read(**{field: value})


def test_multi_token_prediction_is_left_out_with_a_notice() -> None:
    """The layers are left out, and somebody is told."""
    with pytest.warns(UserWarning, match="multi-token prediction"):
        config = read(num_nextn_predict_layers=1)
    assert config == read()


def write(folder: Path, name: str, content: Any) -> None:
    """Write a JSON file."""
    (folder / name).write_text(json.dumps(content))


def test_end_tokens_of_the_generation_config_go_first(tmp_path: Path) -> None:
    """Where both files name end tokens, the generation config is right."""
    write(tmp_path, "config.json", {**TINY, "eos_token_id": 2})
    assert read_model_config(read_config_files(tmp_path)).eos_token_ids == (2,)
    write(tmp_path, "generation_config.json", {"temperature": 1})
    assert read_model_config(read_config_files(tmp_path)).eos_token_ids == (2,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [2, 11]})
    assert read_model_config(read_config_files(tmp_path)).eos_token_ids == (2, 11)


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Each fault names its file."""
    with pytest.raises(CheckpointError, match="config.json does not exist"):
        read_config_files(tmp_path)
    write(tmp_path, "config.json", [1])
    with pytest.raises(CheckpointError, match="does not hold a JSON object"):
        read_config_files(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is damaged"):
        read_config_files(tmp_path)


def test_every_parameter_has_a_source() -> None:
    """No two parameters share a tensor, and none is without."""
    config = read(use_bias=True, mlp_bias=True, moe_latent_size=8)
    sources = FAMILIES["nemotron_h"].sources(config)
    names = [name for spec in parameter_specs(config) for name in sources[spec].names]
    assert len(names) == len(set(names))


def test_stored_forms() -> None:
    """Transforms from what checkpoints store."""
    assert torch.equal(decay_rate(torch.tensor([0.0])), torch.tensor([-1.0]))
    assert filter_taps(torch.zeros(6, 1, 4)).shape == (6, 4)
