"""The whole model: right, and the same cut, crowded, resumed and restored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from lockstep.assemble import build_components
from lockstep.config import ModelConfig
from lockstep.interfaces import component_keys
from lockstep.memory import Caches, Sizes
from lockstep.parameters import (
    AttentionParameters,
    LinearParameters,
    MambaParameters,
    MlpParameters,
    MoeParameters,
    Parameters,
)
from tests import oracles
from tests.factories import (
    DEVICE,
    ENGINE,
    MODEL_NAMES,
    Row,
    fresh_caches,
    generator,
    load,
    make_batch,
    model_config,
    plan_sizes,
    random_parameters,
)
from tests.tolerances import assert_budgeted, assert_consistent, assert_equal

BLOCK = 16
#: A whole model takes longer than one of its functions: fewer examples of it.
FEW = settings(max_examples=settings().max_examples // 5)
#: Components that a forward pass calls.
CALLED = (
    "rms_norm",
    "add_rms_norm",
    "gated_group_rms_norm",
    "linear",
    "conv_decode",
    "conv_prefill",
    "scan_decode",
    "scan_prefill",
    "append_kv",
    "append_rotary_kv",
    "attend_decode",
    "attend_prefill",
    "activate",
    "activate_gated",
    "route",
    "apply_experts",
    "copy_states",
)


@dataclass
class Runner:
    """A model with pools of its own; all that nobody wrote is NaN."""

    config: ModelConfig
    sizes: Sizes
    model: Any
    caches: Caches

    @classmethod
    def make(
        cls, side: str, config: ModelConfig, replaced: dict[str, Any] | None = None
    ) -> Runner:
        """Build a model of one side, with some components replaced."""
        sizes, parameters = plan_sizes(config), random_parameters(config)
        components = build_components(side, replaced)
        model = load(side, "model").Model(config, sizes, parameters, components, DEVICE)
        return cls(config, sizes, model, fresh_caches(config))

    def forward(
        self, decodes: list[Row] | None = None, prefills: list[Row] | None = None
    ) -> Tensor:
        """Run one step and return the logits of all its tokens."""
        batch = make_batch(self.sizes, decodes, prefills)
        return self.model.forward(batch, self.caches)

    def whole(self, tokens: list[int], slot: int = 0, first_block: int = 0) -> Tensor:
        """Run a request in one slice, from nothing."""
        return self.forward([], [self.row(tokens, 0, len(tokens), slot, first_block)])

    def row(
        self,
        tokens: list[int],
        start: int,
        end: int,
        slot: int = 0,
        first_block: int = 0,
    ) -> Row:
        """Make the row of a slice; it starts fresh, or from its own live slot."""
        initial = None if start else self.sizes.zero_slot
        blocks = list(range(first_block, first_block + 6))
        return Row(start, tokens[start:end], slot, initial, blocks)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Draw token ids."""
    vocab, source = model_config().vocab_size, generator(seed)
    return torch.randint(vocab, (count,), generator=source, device="cpu").tolist()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_equals_dense_operations(side: str, name: str) -> None:
    """Logits after every token are those of a dense computation in float64."""
    config, tokens = model_config(name), some_tokens(2 * BLOCK + 5)
    exact = oracles.forward(config, random_parameters(config), tokens)
    logits = Runner.make(side, config).whole(tokens)
    assert logits.dtype == torch.float32
    # Those of a bfloat16 model are rounded to that on the way.
    is_coarse = config.dtype == "bfloat16"
    assert_budgeted("model", logits.bfloat16() if is_coarse else logits, exact)


@pytest.mark.parametrize("name", ["hybrid", "latent", "tied"])
def test_equals_transformers(side: str, name: str) -> None:
    """The published model, with the same weights, gives the same logits."""
    config, tokens = model_config(name), some_tokens(2 * BLOCK + 5)
    theirs = published_model(config, random_parameters(config))
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    assert_budgeted("model", Runner.make(side, config).whole(tokens), expected)


def test_decode_equals_transformers(side: str) -> None:
    """So does the published model when it decodes with its own cache."""
    config, tokens = model_config(), some_tokens(BLOCK + 6)
    theirs = published_model(config, random_parameters(config))
    runner = Runner.make(side, config)
    with torch.no_grad():
        output = theirs(torch.tensor([tokens[:BLOCK]]), use_cache=True)
        runner.whole(tokens[:BLOCK])
        for position in range(BLOCK, len(tokens)):
            token = torch.tensor([tokens[position : position + 1]])
            output = theirs(
                token, past_key_values=output.past_key_values, use_cache=True
            )
            row = runner.row(tokens, position, position + 1)
            assert_budgeted("model", runner.forward([row]), output.logits[0])


@pytest.mark.parametrize("name", MODEL_NAMES)
@FEW
@given(pieces=st.lists(st.integers(1, BLOCK + 1), min_size=2, max_size=4))
def test_pieces_equal_the_whole(side: str, name: str, pieces: list[int]) -> None:
    """A prompt cut anywhere gives the same logits; single tokens decode."""
    tokens = some_tokens(sum(pieces))
    runner = Runner.make(side, model_config(name))
    whole = runner.whole(tokens, slot=3, first_block=9)
    outputs, start = list[Tensor](), 0
    for count in pieces:
        row = runner.row(tokens, start, start + count)
        is_decode = start > 0 and count == 1
        outputs.append(
            runner.forward([row]) if is_decode else runner.forward([], [row])
        )
        start += count
    assert_consistent(side, "model", torch.cat(outputs), whole)


@pytest.mark.parametrize("name", MODEL_NAMES)
@FEW
@given(num_decodes=st.integers(0, 4), order=st.permutations(range(4)))
def test_company_changes_nothing(
    side: str, name: str, num_decodes: int, order: list[int]
) -> None:
    """A row gets the same logits alone and in any batch, order and slot."""
    lengths = [3, BLOCK, BLOCK + 2, 9]
    prompts = [some_tokens(n, seed=n) for n in lengths]
    alone, crowd = (Runner.make(side, model_config(name)) for _ in range(2))
    rows, expected = list[Row](), list[Tensor]()
    for place, index in enumerate(order):
        tokens, first_block = prompts[index], 6 * place
        single = alone.whole(tokens)
        is_decode = place < num_decodes
        start = lengths[index] - 1 if is_decode else 0
        if is_decode:
            crowd.forward([], [crowd.row(tokens, 0, start, place, first_block)])
        rows.append(crowd.row(tokens, start, lengths[index], place, first_block))
        expected.append(single[start:])
    together = crowd.forward(rows[:num_decodes], rows[num_decodes:])
    assert_consistent(side, "model", together, torch.cat(expected))


@pytest.mark.parametrize("name", ["attention", "turned"])
def test_blocks_may_lie_anywhere(side: str, name: str) -> None:
    """A token is known by its position, not by where its K/V lies."""
    tokens, logits = some_tokens(2 * BLOCK + 5), list[Tensor]()
    for blocks in ([0, 1, 2], [7, 3, 5]):
        runner = Runner.make(side, model_config(name))
        row = replace(runner.row(tokens, 0, len(tokens)), blocks=blocks)
        logits.append(runner.forward([], [row]))
    assert_consistent(side, "model", logits[1], logits[0])


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_restored_equals_uninterrupted(side: str, name: str) -> None:
    """A request that starts from another's blocks and snapshot computes the same."""
    prefix, tail = some_tokens(2 * BLOCK), some_tokens(7, seed=1)
    runner = Runner.make(side, model_config(name))
    whole = runner.whole(prefix + tail, slot=3, first_block=12)
    snapshot = runner.sizes.first_snapshot_slot
    first = runner.row(prefix + [5, 6], 0, 2 * BLOCK + 2, slot=1)
    first.snapshots = [(2 * BLOCK, snapshot)]
    runner.forward([], [first])
    kept = [pool[:, snapshot].clone() for pool in runner.caches.tensors()[1:]]
    second = Row(2 * BLOCK, tail, 2, snapshot, [0, 1, 9])
    logits = runner.forward([], [second])
    assert_consistent(side, "model", logits, whole[2 * BLOCK :])
    for pool, before in zip(runner.caches.tensors()[1:], kept, strict=True):
        assert_equal(pool[:, snapshot], before)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_decode_snapshots(side: str, name: str) -> None:
    """The state after a decode step is stored where the batch says."""
    tokens, runner = some_tokens(BLOCK + 5), Runner.make(side, model_config(name))
    whole = runner.whole(tokens, slot=3, first_block=12)
    snapshot = runner.sizes.first_snapshot_slot + 2
    rows = {1: tokens, 0: some_tokens(BLOCK + 5, seed=1)}
    fills = [runner.row(t, 0, BLOCK - 1, slot, 6 * slot) for slot, t in rows.items()]
    runner.forward([], fills)
    last, other = (
        runner.row(t, BLOCK - 1, BLOCK, slot, 6 * slot) for slot, t in rows.items()
    )
    last.snapshots = [(BLOCK, snapshot)]
    runner.forward([other, last])
    # The live slot moves on; the snapshot does not.
    runner.forward([runner.row(tokens, BLOCK, BLOCK + 1, 1, 6)])
    resumed = Row(BLOCK, tokens[BLOCK:], 2, snapshot, [6, 18])
    logits = runner.forward([], [resumed])
    assert_consistent(side, "model", logits, whole[BLOCK:])


def test_only_wanted_logits(side: str) -> None:
    """Logits come for the tokens that the batch names, in its order."""
    tokens, runner = some_tokens(9), Runner.make(side, model_config())
    whole = runner.whole(tokens)
    batch = make_batch(runner.sizes, [], [runner.row(tokens, 0, 9)])
    for wanted in ([2, 8], [8], []):
        index = torch.tensor(wanted, dtype=torch.int64)
        wanting = replace(batch, logit_index=index)
        logits = runner.model.forward(wanting, runner.caches)
        assert_consistent(side, "model", logits, whole[wanted])


def test_nothing_else_is_written(side: str) -> None:
    """A step writes its own blocks, slots and snapshots, and leaves all others."""
    tokens, runner = some_tokens(BLOCK + 3), Runner.make(side, model_config())
    snapshot = runner.sizes.first_snapshot_slot + 1
    row = runner.row(tokens, 0, BLOCK + 3, slot=2, first_block=4)
    row.snapshots = [(BLOCK, snapshot)]
    runner.forward([], [row])
    kv, conv, ssm = runner.caches.tensors()
    written = kv.flatten(2, 3)[:, :, 4 * BLOCK : 5 * BLOCK + 3]
    assert not written.isnan().any()
    written.fill_(torch.nan)
    assert kv.isnan().all()
    for pool in (conv, ssm):
        assert not pool[:, [2, snapshot]].isnan().any()
        pool[:, [2, snapshot]] = torch.nan
        zero = runner.sizes.zero_slot
        assert_equal(pool[:, zero], torch.zeros_like(pool[:, zero]))
        pool[:, zero] = torch.nan
        assert pool.isnan().all()


@pytest.mark.parametrize("name", CALLED)
def test_every_component_is_called(side: str, name: str) -> None:
    """Each operation goes through the components, and so can be replaced."""
    calls = list[str]()
    key = next(k for k in component_keys_of_forward() if k.endswith(f".{name}"))
    original = getattr(build_components(side), name)
    tokens, options = some_tokens(5), ("append_rotary_kv", "activate_gated")
    config = model_config("scaled" if name in options else "hybrid")
    runner = Runner.make(side, config, {key: counting(original, name, calls)})
    runner.forward([], [runner.row(tokens, 0, 4)])
    one, two = runner.row(tokens, 4, 5), runner.row(tokens, 0, 3, 1, 6)
    runner.forward([one], [two])
    assert calls


def test_the_engine_sets_the_scan_chunk(side: str) -> None:
    """Scans see the engine's scan chunk, not the checkpoint's."""
    seen = list[int]()
    original = build_components(side).scan_prefill

    def scan_prefill(tokens: Any, parameters: Any, config: Any, *rest: Any) -> Tensor:
        seen.append(config.scan_chunk_size)
        return original(tokens, parameters, config, *rest)

    config = model_config("mamba")
    assert config.mamba is not None
    config = replace(config, mamba=replace(config.mamba, scan_chunk_size=64))
    runner = Runner.make(side, config, {"scan.scan_prefill": scan_prefill})
    runner.whole(some_tokens(3))
    assert set(seen) == {ENGINE.scan_chunk_size}


def counting(
    function: Callable[..., Any], name: str, calls: list[str]
) -> Callable[..., Any]:
    """Wrap a function so that its calls are noted."""

    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    return counted


def component_keys_of_forward() -> list[str]:
    """List the keys of the components that a forward pass calls."""
    return [key for key in component_keys() if key.split(".")[1] in CALLED]


def published_model(
    config: ModelConfig, parameters: Parameters
) -> NemotronHForCausalLM:
    """Build the published model with our weights."""
    mamba, attention, mlp, moe = config.mamba, config.attention, config.mlp, config.moe
    assert mamba and attention and mlp and moe
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    published = NemotronHConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers_block_type=[names[letter] for letter in config.layer_pattern],
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=mlp.size,
        ssm_state_size=mamba.state_size,
        mamba_num_heads=mamba.num_heads,
        mamba_head_dim=mamba.head_dim,
        n_groups=mamba.num_groups,
        conv_kernel=mamba.conv_width,
        chunk_size=mamba.scan_chunk_size,
        # The published chunked scan clamps time steps from below by this.
        time_step_min=torch.finfo(torch.float32).tiny,
        n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.expert_size,
        moe_shared_expert_intermediate_size=moe.shared_size,
        moe_latent_size=moe.latent_size,
        routed_scaling_factor=moe.scaling,
        n_group=moe.num_groups,
        topk_group=moe.top_k_groups,
        norm_topk_prob=moe.normalize_weights,
        layer_norm_epsilon=config.norm_eps,
    )
    published._attn_implementation = "eager"
    published._experts_implementation = "eager"
    model = NemotronHForCausalLM(published).eval()
    model.load_state_dict(published_weights(parameters))
    return model


def published_weights(parameters: Parameters) -> dict[str, Tensor]:
    """Name our weights as the published model does."""
    weights = {
        "model.embeddings.weight": parameters.embedding,
        "model.norm_f.weight": parameters.final_norm,
        "lm_head.weight": parameters.head,
    }
    for index, layer in enumerate(parameters.layers):
        prefix = f"model.layers.{index}."
        weights[prefix + "norm.weight"] = layer.norm
        for name, value in published_layer(layer).items():
            if isinstance(value, LinearParameters):
                name, value = f"{name}.weight", value.weight
            if value is not None:
                weights[f"{prefix}mixer.{name}"] = value
    return weights


def published_layer(layer: Any) -> dict[str, Any]:
    """Name the weights of one layer's mixer."""
    if isinstance(layer, MambaParameters):
        return {
            "in_proj": layer.in_proj,
            "conv1d.weight": layer.conv_weight[:, None],
            "conv1d.bias": layer.conv_bias,
            "A_log": torch.log(-layer.A),
            "dt_bias": layer.dt_bias,
            "D": layer.D,
            "norm.weight": layer.gated_norm,
            "out_proj": layer.out_proj,
        }
    if isinstance(layer, AttentionParameters | MlpParameters):
        return {name: value for name, value in vars(layer).items() if name != "norm"}
    assert isinstance(layer, MoeParameters)
    return {
        "gate.weight": layer.router,
        "gate.e_score_correction_bias": layer.correction,
        "experts.up_proj": layer.experts_up,
        "experts.down_proj": layer.experts_down,
        "shared_experts.up_proj": layer.shared_up,
        "shared_experts.down_proj": layer.shared_down,
        "fc1_latent_proj": layer.latent_down,
        "fc2_latent_proj": layer.latent_up,
    }
