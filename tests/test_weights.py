"""Reading checkpoints, and drawing weights by rule."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.errors import CheckpointError
from lockstep.families import read_config_files, read_model_config
from lockstep.parameters import (
    MambaParameters,
    MlpParameters,
    MoeParameters,
    ParameterKind,
    Parameters,
    make_parameters,
)
from lockstep.weights import Checkpoint, RandomWeights
from tests.checkpoints import MOE, save
from tests.engines import WITNESS
from tests.factories import CPU, model_config
from tests.tolerances import SIGNIFICANCE, assert_equal

MODEL_FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved mixture-of-experts model."""
    return save(tmp_path, {**MOE, "moe_latent_size": 16})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Parameters:
    """Load a folder's parameters."""
    config = read_model_config(read_config_files(folder))
    return make_parameters(config, dtype, CPU, Checkpoint(folder, config, CPU).fill)


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or, with None, remove stored tensors; ``__`` stands for a dot."""
    tensors: dict[str, Tensor | None] = dict(load_file(folder / MODEL_FILE))
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / MODEL_FILE)


def test_values_are_those_stored(folder: Path) -> None:
    """Plain, transformed and stacked tensors arrive where they belong."""
    stored = load_file(folder / MODEL_FILE)
    parameters = load(folder)
    assert_equal(parameters.embedding, stored["backbone.embeddings.weight"])
    mamba, moe = parameters.layers[0], parameters.layers[1]
    assert isinstance(mamba, MambaParameters)
    assert isinstance(moe, MoeParameters)
    mixer = "backbone.layers.0.mixer."
    assert_equal(mamba.A, -stored[mixer + "A_log"].exp())
    assert_equal(mamba.conv_weight, stored[mixer + "conv1d.weight"][:, 0])
    for expert, matrix in enumerate(moe.experts_up):
        name = f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight"
        assert_equal(matrix, stored[name])


def test_dtypes(folder: Path) -> None:
    """Matrices take the model's dtype; what enters float32 arithmetic does not."""
    mamba, moe = load(folder, torch.bfloat16).layers[:2]
    assert isinstance(mamba, MambaParameters)
    assert isinstance(moe, MoeParameters)
    assert moe.correction is not None
    assert mamba.in_proj.weight.dtype == moe.experts_up.dtype == torch.bfloat16
    assert mamba.norm.dtype == torch.bfloat16
    for values in (mamba.A, mamba.dt_bias, mamba.D, moe.router, moe.correction):
        assert values.dtype == torch.float32


def test_all_faults_are_listed_at_once(folder: Path) -> None:
    """Missing, unknown and wrongly shaped tensors come in one error."""
    edit(
        folder,
        backbone__norm_f__weight=None,
        backbone__layers__1__mixer__experts__2__up_proj__weight=None,
        backbone__layers__0__mixer__D=torch.zeros(3),
        backbone__layers__0__mixer__conv1d__weight=torch.zeros(4),
        backbone__surprise=torch.zeros(1),
    )
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "5 tensors do not fit" in message
    assert "missing: norm_f.weight" in message
    assert "missing: layers.1.mixer.experts.2.up_proj.weight" in message
    assert "wrong shape: layers.0.mixer.D is (3,)" in message
    assert "asks for (8,)" in message
    assert "wrong shape: layers.0.mixer.conv1d.weight is (4,)" in message
    assert "unknown: surprise" in message


def test_a_long_list_of_faults_is_cut(folder: Path) -> None:
    """A checkpoint of another model altogether does not fill the screen."""
    save_file({f"other.{n}": torch.zeros(1) for n in range(99)}, folder / MODEL_FILE)
    with pytest.raises(CheckpointError, match=r"and \d+ more$") as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) == 22


def test_a_separate_head_of_a_tied_model_is_a_fault(tmp_path: Path) -> None:
    """`transformers` 5.17.0 keeps such a head apart; the config says it is tied."""
    save(tmp_path, {"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match="unknown: lm_head.weight"):
        load(tmp_path)
    edit(tmp_path, lm_head__weight=None)
    parameters = load(tmp_path)
    assert parameters.head is parameters.embedding


def test_damaged_files(folder: Path) -> None:
    """Cut, overwritten or absent: the error names the file."""
    path = folder / MODEL_FILE
    content = path.read_bytes()
    for bad in (content[:-100], content[:4], b"", b"\xff" * 4096):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load(folder)


def test_damaged_shards(tmp_path: Path) -> None:
    """A shard that is absent, and an index that says nothing."""
    save(tmp_path, {}, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = sorted(set(json.loads(index.read_text())["weight_map"].values()))[1]
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard} does not exist"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(tmp_path)


def test_gates_are_joined_to_what_they_gate(tmp_path: Path) -> None:
    """Two stored matrices become one; each is missed, or wrong, by itself."""
    save(tmp_path, {"model_type": "llama", "mlp_bias": True})
    stored = load_file(tmp_path / MODEL_FILE)
    mlp = load(tmp_path).layers[1]
    assert isinstance(mlp, MlpParameters)
    names = [f"model.layers.0.mlp.{name}_proj." for name in ("gate", "up")]
    assert_equal(mlp.up_proj.weight, torch.cat([stored[n + "weight"] for n in names]))
    assert mlp.up_proj.bias is not None
    assert_equal(mlp.up_proj.bias, torch.cat([stored[n + "bias"] for n in names]))
    gate = {"model__layers__0__mlp__gate_proj__weight": torch.zeros(3, 48)}
    edit(tmp_path, model__layers__1__mlp__up_proj__weight=None, **gate)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "missing: layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "mlp.gate_proj.weight is (3, 48)" in str(caught.value)
    assert "asks for (64, 48)" in str(caught.value)


def test_packed_experts_under_both_names(tmp_path: Path) -> None:
    """As Granite was published, and as `transformers` names them."""
    both: list[Parameters] = []
    for original in (True, False):
        fields = {"model_type": "granitemoehybrid"}
        folder = save(tmp_path / str(original), fields, save_original_format=original)
        is_published = any("input_linear" in n and "moe" in n for n in names_of(folder))
        assert is_published == original
        both.append(load(folder))
    for ours, theirs in zip(
        *(parameters.layers[1::2] for parameters in both), strict=True
    ):
        assert isinstance(ours, MoeParameters)
        assert isinstance(theirs, MoeParameters)
        assert ours.correction is None
        for name in ("router", "experts_up", "experts_down"):
            assert_equal(getattr(ours, name), getattr(theirs, name))


def names_of(folder: Path) -> list[str]:
    """List the names of the stored tensors."""
    return list(load_file(folder / MODEL_FILE))


def test_tensors_that_older_checkpoints_hold(tmp_path: Path) -> None:
    """Frequencies, a copy of the embedding for a head, and one letter less."""
    llama = save(tmp_path / "llama", {"model_type": "llama"})
    edit(llama, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(llama)
    fields = {"model_type": "qwen3", "tie_word_embeddings": True}
    qwen = save(tmp_path / "qwen3", fields)
    edit(
        qwen, lm_head__weight=load_file(qwen / MODEL_FILE)["model.embed_tokens.weight"]
    )
    parameters = load(qwen)
    assert parameters.head is parameters.embedding
    mamba = save(tmp_path / "mamba2", {"model_type": "mamba2"})
    embedding = load_file(mamba / MODEL_FILE)["backbone.embeddings.weight"]
    edit(
        mamba, backbone__embeddings__weight=None, backbone__embedding__weight=embedding
    )
    assert_equal(load(mamba).embedding, embedding)


def draw(
    config: ModelConfig, rule: RandomWeights, dtype: torch.dtype = torch.float32
) -> Parameters:
    """Draw a model on the CPU."""
    return make_parameters(config, dtype, CPU, rule.fill)


def test_draws_depend_on_seed_and_name_alone() -> None:
    """The same tensor in another model, or after others, is the same."""
    config = model_config()
    deeper = replace(config, layer_pattern=config.layer_pattern + "M", vocab_size=7)
    one, two = draw(config, RandomWeights()), draw(deeper, RandomWeights())
    other = draw(config, RandomWeights(seed=1))
    for index, layer in enumerate(one.layers):
        for name in ("in_proj", "q_proj", "up_proj"):
            if hasattr(layer, name):
                weight = getattr(layer, name).weight
                assert_equal(weight, getattr(two.layers[index], name).weight)
                assert not torch.equal(
                    weight, getattr(other.layers[index], name).weight
                )
    first, third = one.layers[0], one.layers[2]
    assert isinstance(first, MambaParameters)
    assert isinstance(third, MambaParameters)
    assert not torch.equal(first.in_proj.weight, third.in_proj.weight)


def test_a_narrow_dtype_only_rounds() -> None:
    """The same model in another dtype is the same model."""
    wide = draw(model_config(), RandomWeights())
    narrow = draw(model_config(), RandomWeights(), torch.bfloat16)
    assert_equal(narrow.embedding, wide.embedding.bfloat16())


def sample(kind: ParameterKind, rule: RandomWeights) -> Tensor:
    """Draw many values of one kind."""
    values = torch.empty((400, 100) if kind == "matrix" else (40_000,))
    rule.fill(values, "name", kind)
    return values


def assert_uniform(values: Tensor) -> None:
    """Hold values to the uniform distribution on [0, 1], by Kolmogorov's statistic."""
    ordered = values.sort().values
    expected = (torch.arange(len(values)) + 0.5) / len(values)
    limit = math.sqrt(-math.log(SIGNIFICANCE / 2) / 2 / len(values))
    assert (ordered - expected).abs().max() < limit


def test_the_rule() -> None:
    """The distributions that benchmarks use."""
    rule = RandomWeights()
    matrix = sample("matrix", rule)
    assert_uniform(torch.special.ndtr(matrix.flatten() / 0.02))
    assert_uniform((-sample("decay", rule) - 1) / 15)
    step = torch.nn.functional.softplus(sample("time_step", rule))
    assert_uniform((step.log() - math.log(0.001)) / math.log(100))
    constant: dict[ParameterKind, float] = {"norm": 1, "skip": 1}
    constant |= {"bias": 0, "correction": 0}
    for kind, value in constant.items():
        assert (sample(kind, rule) == value).all()


def test_the_witness_rule() -> None:
    """Slow decays, long steps, and nothing without effect."""
    decay = -sample("decay", WITNESS)
    assert_uniform((decay.log() - math.log(0.01)) / math.log(200))
    step = torch.nn.functional.softplus(sample("time_step", WITNESS))
    assert_uniform((step.log() - math.log(0.1)) / math.log(10))
    assert_uniform(torch.special.ndtr(sample("skip", WITNESS) / 0.1))
    matrix = sample("matrix", WITNESS)
    assert_uniform(torch.special.ndtr(matrix.flatten() * 10))
    for kind in ("bias", "correction", "norm"):
        assert sample(kind, WITNESS).std() > 0.05
