"""The independent oracle: Lockstep equals `transformers` on its own checkpoints.

Each variant is a tiny random checkpoint that `transformers` saves; Lockstep loads it,
and the log-probabilities of every position and 64 greedy tokens are compared with those
of `transformers` recomputing the whole sequence without a cache, in float32 on a CPU.

Faults of transformers 5.17 that are stepped around:

* ``nemotron_h`` does not obey ``time_step_limit``: its prefill form clamps time steps
  to (``time_step_min``, infinity), and its one-token form does not clamp at all. The
  configs set ``time_step_min`` to 1e-9, except where a test sets the limits themselves.
* ``tie_word_embeddings`` ties nothing: head and embedding are saved and loaded apart.
* ``attention_bias`` makes no bias.
* The gated norm of the other families is one over all channels, until 5.23, where that
  of Mamba-2 as published is one for each group. Here it is cut into groups.

The other families' prefill form obeys the limits, and it alone is asked here: their
one-token form does not clamp time steps either. Nor is ``bamba`` asked to continue from
a cache, for which it needs ``position_ids``: by itself it counts them from zero again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.llm import DEMO_FOLDER
from lockstep.verify.library import group_norms
from tests.checkpoints import BASE, MOE, edit_config, save
from tests.tolerances import TRANSFORMERS_LOGPROBS

PROMPT_LENGTH = 45
NUM_GREEDY = 64

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "one group": {"n_groups": 1},
    "four groups": {"n_groups": 4, "num_key_value_heads": 1},
    "no shared heads": {"num_key_value_heads": 4, "chunk_size": 32},
    "biases": {"use_bias": True, "mlp_bias": True},
    "no conv bias": {"use_conv_bias": False, "conv_kernel": 3},
    "silu": {"mlp_hidden_act": "silu", "layer_norm_epsilon": 1e-3},
    "gelu": {"mlp_hidden_act": "gelu", "conv_kernel": 2},
    "attention alone": {"hybrid_override_pattern": "*-*-"},
    "mamba alone": {"hybrid_override_pattern": "MM"},
    "moe": MOE,
    "moe, one expert a token": {**MOE, "num_experts_per_tok": 1},
    "moe, weights not normalized": {**MOE, "norm_topk_prob": False},
    "moe, expert groups": {**MOE, "n_group": 4, "topk_group": 2},
    "moe, latent": {**MOE, "moe_latent_size": 16},
    "moe, everything": {
        **MOE,
        "n_group": 2,
        "topk_group": 1,
        "moe_latent_size": 32,
        "mlp_bias": True,
        "use_bias": True,
        "mlp_hidden_act": "silu",
    },
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LIMITS = {"time_step_limit": (0.3, 0.9)}
#: The other families.
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "bamba": {
        "half of each head turned": {},
        "whole heads turned": {
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}
        },
        "linear, one group": {"rope_parameters": LINEAR, "mamba_n_groups": 1},
        "biases": {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
        "limits, tied": {**LIMITS, "tie_word_embeddings": True},
        "longer scan chunks": {"mamba_chunk_size": 64, "mamba_d_conv": 3},
    },
    "granitemoehybrid": {
        "experts": {},
        "experts, rotary": {"position_embedding_type": "rope"},
        "no experts": {"num_local_experts": 0},
        "no experts, rotary, tied": {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
        "attention alone": {
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
        },
        "limits, one expert a token": {**LIMITS, "num_experts_per_tok": 1},
        "biases": {"attention_bias": True, "mamba_proj_bias": True},
    },
    "mamba2": {
        "plain": {},
        "one group": {"n_groups": 1},
        "biases": {"use_bias": True, "use_conv_bias": False},
        "limits, tied": {**LIMITS, "tie_word_embeddings": True},
    },
    "llama": {
        "plain": {},
        "linear": {"rope_parameters": LINEAR},
        "llama3, tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
        "one shared head": {"num_key_value_heads": 1, "head_dim": 20},
        "no shared heads": {"num_key_value_heads": 4, "hidden_act": "gelu"},
        "biases": {"attention_bias": True, "mlp_bias": True},
    },
    "qwen3": {
        "plain": {},
        "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
        "linear": {"rope_parameters": LINEAR},
    },
}
VARIANTS |= {
    f"{family}, {name}": {"model_type": family, **fields}
    for family, variants in OTHERS.items()
    for name, fields in variants.items()
}


def oracle(folder: Path, **options: Any) -> Any:
    """Load a checkpoint with `transformers`, in float32."""
    options = {"dtype": torch.float32, **options}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    group_norms(model)
    return model


@torch.no_grad()
def oracle_logprobs(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Compute the whole sequence without a cache."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits, dim=-1)


def oracle_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Continue a prompt greedily, computing everything again for each token."""
    token_ids = list(prompt)
    for _ in range(NUM_GREEDY):
        token_ids.append(int(oracle_logprobs(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def lockstep_run(folder: Path, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Continue a prompt greedily, in uneven slices, keeping all log-probabilities."""
    config = EngineConfig(max_tokens_per_step=23, record_logprobs=True, max_requests=2)
    llm = LLM(folder, device="cpu", config=config, verbose=False)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)
    name = llm.engine.add(prompt, sampling)
    logprobs: list[Tensor] = []
    while llm.engine.has_work:
        record = llm.engine.step()
        logprobs.append(record.logprobs[name])
        for output in record.finished:
            return output.token_ids, torch.cat(logprobs)
    raise AssertionError("the request did not finish")


def prompt_for(vocab_size: int) -> list[int]:
    """Draw a prompt."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(vocab_size, (PROMPT_LENGTH,), generator=generator).tolist()


def assert_equal(
    folder: Path,
    change: Callable[[PreTrainedModel], None] = lambda model: None,
    **options: Any,
) -> None:
    """Compare both on one folder."""
    model = oracle(folder, **options)
    change(model)
    prompt = prompt_for(model.config.vocab_size)
    tokens, logprobs = lockstep_run(folder, prompt)
    expected = oracle_logprobs(model, [*prompt, *tokens[:-1]])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=TRANSFORMERS_LOGPROBS)
    assert tokens == oracle_greedy(model, prompt)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, tmp_path: Path) -> None:
    """Every option of the model definition."""
    assert_equal(save(tmp_path, VARIANTS[name]))


@pytest.mark.parametrize("packed", [False, True], ids=["one by one", "packed"])
@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "sharded"])
def test_stored_form(packed: bool, size: str, tmp_path: Path) -> None:
    """Experts one by one or packed, tensors in one file or several."""
    fields = VARIANTS["moe, latent"]
    save(tmp_path, fields, save_original_format=not packed, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "20KB")
    assert_equal(tmp_path)


def test_published_spelling(tmp_path: Path) -> None:
    """The spelling of the checkpoints as they were first published."""
    save(tmp_path, MOE)
    edit_config(
        tmp_path,
        remove=("layers_block_type", "dtype", "layer_norm_epsilon"),
        hybrid_override_pattern=MOE["hybrid_override_pattern"],
        num_hidden_layers=len(MOE["hybrid_override_pattern"]),
        torch_dtype="float32",
        norm_eps=1e-5,
        time_step_limit=[0.0, math.inf],
        rope_theta=10000,
    )
    assert_equal(tmp_path)


def test_older_names_of_layers(tmp_path: Path) -> None:
    """Layer types as the library itself once named them."""
    save(tmp_path, {})
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    types = [names[letter] for letter in BASE["hybrid_override_pattern"]]
    edit_config(tmp_path, layers_block_type=types)
    assert_equal(tmp_path)


def test_experts_one_at_a_time(tmp_path: Path) -> None:
    """The library's plain loop over experts, instead of its grouped product."""
    assert_equal(save(tmp_path, MOE), experts_implementation="eager")


@pytest.mark.parametrize("limits", [(0.2, math.inf), (0.0, 0.5), (0.3, 0.9)])
def test_time_step_limits(limits: tuple[float, float], tmp_path: Path) -> None:
    """Limits hold in prefill and decode alike; the library is made to obey them."""
    save(tmp_path, {"time_step_limit": limits})

    def obey(model: PreTrainedModel) -> None:
        for mixer in mamba_mixers(model):
            assert mixer.time_step_limit == (1e-9, math.inf)
            mixer.time_step_limit = limits

    assert_equal(tmp_path, obey)
    with pytest.raises(AssertionError):
        assert_equal(tmp_path)


def mamba_mixers(model: PreTrainedModel) -> list[Any]:
    """List the mixers of the Mamba-2 layers."""
    layers: list[Any] = [*model.model.layers]
    return [x.mixer for x in layers if x.block_type == "linear_attention"]


def test_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    """Both leave the extra layers out; Lockstep says so."""
    save(tmp_path, {"num_nextn_predict_layers": 1})
    path = tmp_path / "model.safetensors"
    extra = {"mtp.layers.0.norm.weight": torch.ones(BASE["hidden_size"])}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="multi-token prediction"):
        assert_equal(tmp_path)


def test_demo_model() -> None:
    """The packaged checkpoint is an ordinary one."""
    assert_equal(DEMO_FOLDER)
