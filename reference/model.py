"""The whole model: embedding, layers in the order of the pattern, head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig, MlpConfig, ModelConfig, MoeConfig, Sizes
from lockstep.interfaces import Components
from lockstep.memory import Caches
from lockstep.parameters import (
    AttentionParameters,
    LinearParameters,
    MambaParameters,
    MlpParameters,
    MoeParameters,
    Parameters,
)
from lockstep.shapes import Hidden, Logits, NormWeight


class Model:
    """A hybrid language model that reads and writes the engine's pools.

    It holds parameters and no state: everything that outlives a step is in `Caches`,
    and everything that a step needs to know is in `BatchMetadata`. Every operation goes
    through the engine's components, so that any can be replaced.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        sizes: Sizes,
        parameters: Parameters,
        components: Components,
        device: torch.device,
    ) -> None:
        """Keep what `forward` needs; nothing is copied.

        Args:
            model_config: The model's layers and sizes.
            sizes: The engine's sizes; its scan chunk replaces the checkpoint's.
            parameters: On ``device``.
            components: The operations to use.
            device: Where batches and caches are.
        """
        self.config = model_config
        self.sizes = sizes
        self.parameters = parameters
        self.components = components
        self.device = device
        self.mamba = model_config.mamba and dataclasses.replace(
            model_config.mamba, scan_chunk_size=sizes.scan_chunk_size
        )
        #: For each layer, its index among those of its kind: its layer of a pool.
        self.pool_layers = [
            model_config.layer_pattern[:index].count(letter)
            for index, letter in enumerate(model_config.layer_pattern)
        ]

    @torch.no_grad()
    def forward(self, batch: BatchMetadata, caches: Caches) -> Logits:
        """Compute one step for every token of a batch.

        Args:
            batch: The tokens, where their state is and what is wanted of them.
            caches: K/V of the tokens is appended, live slots move past them, and
                snapshots are stored.

        Returns:
            Logits after the tokens that ``batch.logit_index`` names, in float32.
        """
        config, parameters, eps = self.config, self.parameters, self.config.norm_eps
        residual = parameters.embedding[batch.token_ids]
        residual = _times(residual, config.embedding_multiplier)
        if config.float32_residual:
            residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        norms = [layer.norm for layer in parameters.layers] + [parameters.final_norm]
        hidden = self.components.rms_norm(residual, norms[0], eps)
        for index, next_norm in enumerate(norms[1:]):
            update = self._layer(index, hidden, batch, caches)
            update = _times(update, config.residual_multiplier)
            residual, hidden = self.components.add_rms_norm(
                residual, update, next_norm, eps
            )
        self.components.copy_states(
            caches,
            batch.decode_slot_ids,
            batch.decode_snapshot_slot_ids,
            self.sizes.dummy_slot,
        )
        rows = hidden[batch.logit_index]
        logits = self.components.linear(rows, parameters.head, None).float()
        return logits if config.logit_divisor == 1 else logits / config.logit_divisor

    def _layer(
        self, index: int, hidden: Hidden, batch: BatchMetadata, caches: Caches
    ) -> Hidden:
        """Compute what a layer adds to the residual stream."""
        layer, pool = self.parameters.layers[index], self.pool_layers[index]
        if isinstance(layer, MambaParameters):
            return self._mamba(
                hidden, layer, caches.conv[pool], caches.ssm[pool], batch
            )
        if isinstance(layer, AttentionParameters):
            keys, values = caches.kv[:, pool]
            return self._attention(hidden, layer, keys, values, batch)
        if isinstance(layer, MlpParameters):
            assert self.config.mlp is not None
            return self._mlp(hidden, layer.up_proj, layer.down_proj, self.config.mlp)
        return self._moe(hidden, layer, batch)

    def _mamba(
        self,
        hidden: Hidden,
        layer: MambaParameters,
        conv_states: Tensor,
        ssm_states: Tensor,
        batch: BatchMetadata,
    ) -> Hidden:
        """Project, convolve, scan, gate and norm, project back."""
        config, components = self.mamba, self.components
        assert config is not None
        sizes = [config.inner_size, config.conv_channels, config.num_heads]
        gate, channels, dt = self._linear(hidden, layer.in_proj).split(sizes, dim=1)
        convolved = _by_kind(
            (components.conv_decode, components.conv_prefill),
            channels,
            (layer.conv_weight, layer.conv_bias, conv_states),
            batch,
        )
        scanned = _by_kind(
            (components.scan_decode, components.scan_prefill),
            _scan_tokens(convolved, dt, config),
            (layer, config, ssm_states),
            batch,
        )
        normed = components.gated_group_rms_norm(
            scanned.flatten(1),
            gate,
            layer.gated_norm,
            self.config.norm_eps,
            config.num_groups,
        )
        return self._linear(normed, layer.out_proj)

    def _attention(
        self,
        hidden: Hidden,
        layer: AttentionParameters,
        key_blocks: Tensor,
        value_blocks: Tensor,
        batch: BatchMetadata,
    ) -> Hidden:
        """Project, norm and turn, append to the blocks, attend, project back."""
        config, components = self.config.attention, self.components
        assert config is not None
        queries, keys, values = (
            self._linear(hidden, projection).unflatten(1, (-1, config.head_dim))
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = self._norm_heads(queries, layer.q_norm)
            keys = self._norm_heads(keys, layer.k_norm)
        given = keys, values, key_blocks, value_blocks, batch.kv_index
        if config.rotary is None:
            components.append_kv(*given)
        else:
            queries = components.append_rotary_kv(
                queries, *given, batch.positions, config.rotary
            )
        attended = _by_kind(
            (components.attend_decode, components.attend_prefill),
            queries,
            (key_blocks, value_blocks, config.score_scale),
            batch,
        )
        return self._linear(attended.flatten(1), layer.o_proj)

    def _norm_heads(self, heads: Tensor, weight: NormWeight) -> Tensor:
        """Norm each head of each token on its own."""
        rows = self.components.rms_norm(
            heads.flatten(0, 1), weight, self.config.norm_eps
        )
        return rows.view(heads.shape)

    def _mlp(
        self,
        hidden: Hidden,
        up_proj: LinearParameters,
        down_proj: LinearParameters,
        config: MlpConfig | MoeConfig,
    ) -> Hidden:
        """Project up, activate, project down."""
        components = self.components
        function = components.activate_gated if config.gated else components.activate
        inner = function(self._linear(hidden, up_proj), config.activation)
        return self._linear(inner, down_proj)

    def _moe(
        self, hidden: Hidden, layer: MoeParameters, batch: BatchMetadata
    ) -> Hidden:
        """Add up the routed experts, in the latent width if any, and the shared one."""
        config, components = self.config.moe, self.components
        assert config is not None
        expert_ids, expert_weights = components.route(
            hidden, layer.router, layer.correction, config, batch.token_mask
        )
        inputs = (
            self._linear(hidden, layer.latent_down) if layer.latent_down else hidden
        )
        routed = components.apply_experts(
            inputs,
            expert_ids,
            expert_weights,
            layer.experts_up,
            layer.experts_down,
            config,
        )
        if layer.latent_up:
            routed = self._linear(routed, layer.latent_up)
        if layer.shared_up and layer.shared_down:
            routed = routed + self._mlp(
                hidden, layer.shared_up, layer.shared_down, config
            )
        return routed

    def _linear(self, inputs: Tensor, parameters: LinearParameters) -> Tensor:
        """Multiply by a weight and add its bias, if any."""
        return self.components.linear(inputs, parameters.weight, parameters.bias)


def _times(values: Tensor, factor: float) -> Tensor:
    """Multiply by a factor of the model's, which most models do not have."""
    return values if factor == 1 else values * factor


def _scan_tokens(convolved: Tensor, dt: Tensor, config: MambaConfig) -> ScanTokens:
    """Cut convolved channels into x, B and C, and those into heads and groups."""
    states = config.num_groups * config.state_size
    x, B, C = convolved.split([config.inner_size, states, states], dim=1)
    return ScanTokens(
        x=x.unflatten(1, (config.num_heads, config.head_dim)),
        dt=dt,
        B=B.unflatten(1, (config.num_groups, config.state_size)),
        C=C.unflatten(1, (config.num_groups, config.state_size)),
    )


def _by_kind(
    functions: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    inputs: Tensor | ScanTokens,
    arguments: tuple[Any, ...],
    batch: BatchMetadata,
) -> Tensor:
    """Give decode tokens to the first function and prefill tokens to the second."""
    count, total = batch.num_decode_tokens, len(batch.token_ids)
    bounds = (0, count), (count, total)
    parts = [
        function(_take(inputs, start, end), *arguments, batch)
        for function, (start, end) in zip(functions, bounds, strict=True)
        if start < end
    ]
    return torch.cat(parts)


def _take(inputs: Tensor | ScanTokens, start: int, end: int) -> Tensor | ScanTokens:
    """Take a range of tokens."""
    if isinstance(inputs, ScanTokens):
        return ScanTokens(*(tensor[start:end] for tensor in inputs))
    return inputs[start:end]
