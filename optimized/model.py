"""The whole model: the same operations as the reference's, settled when it is built.

What a layer is, which parameters it has and which layer of a pool, is decided once; a
step runs through a list of layers. Every operation takes all tokens of its kind at
once, and both kinds are run by padded counts, so nothing depends on values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig, MlpConfig, ModelConfig, MoeConfig, Sizes
from lockstep.interfaces import Components
from lockstep.memory import Caches
from lockstep.parameters import (
    AttentionParameters,
    LayerParameters,
    LinearParameters,
    MambaParameters,
    MlpParameters,
    MoeParameters,
    Parameters,
)
from lockstep.shapes import Hidden, Logits, NormWeight

#: A layer: what it adds to the residual stream.
_Layer = Callable[[Tensor, BatchMetadata, Caches], Tensor]


class Model:
    """A hybrid language model that reads and writes the engine's pools."""

    def __init__(
        self,
        model_config: ModelConfig,
        sizes: Sizes,
        parameters: Parameters,
        components: Components,
        device: torch.device,
    ) -> None:
        """Bind every layer to its parameters and to its place in the pools."""
        self.config = model_config
        self.sizes = sizes
        self.parameters = parameters
        self.components = components
        self.device = device
        self.mamba = model_config.mamba and dataclasses.replace(
            model_config.mamba, scan_chunk_size=sizes.scan_chunk_size
        )
        self._layers = [
            self._bind(layer, model_config.layer_pattern[:index].count(letter))
            for index, (letter, layer) in enumerate(
                zip(model_config.layer_pattern, parameters.layers, strict=True)
            )
        ]
        norms = [layer.norm for layer in parameters.layers]
        self._norms = [*norms, parameters.final_norm]

    @torch.no_grad()
    def forward(self, batch: BatchMetadata, caches: Caches) -> Logits:
        """Compute one step for every token of a batch, padding included.

        Cost: launches grow with layers alone. Padded tokens pass through every matrix
        product and no expert.
        """
        config, components, eps = self.config, self.components, self.config.norm_eps
        residual = self.parameters.embedding[batch.token_ids]
        residual = _times(residual, config.embedding_multiplier)
        if config.float32_residual:
            residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        hidden = components.rms_norm(residual, self._norms[0], eps)
        for layer, next_norm in zip(self._layers, self._norms[1:], strict=True):
            update = _times(layer(hidden, batch, caches), config.residual_multiplier)
            residual, hidden = components.add_rms_norm(residual, update, next_norm, eps)
        components.copy_states(
            caches,
            batch.decode_slot_ids,
            batch.decode_snapshot_slot_ids,
            self.sizes.dummy_slot,
        )
        rows = hidden[batch.logit_index]
        logits = components.linear(rows, self.parameters.head, None).float()
        return logits if config.logit_divisor == 1 else logits / config.logit_divisor

    def _bind(self, layer: LayerParameters, pool: int) -> _Layer:
        """Turn a layer's parameters into a function of the step alone."""
        if isinstance(layer, MambaParameters):
            return partial(self._mamba, layer, pool)
        if isinstance(layer, AttentionParameters):
            return partial(self._attention, layer, pool)
        if isinstance(layer, MlpParameters):
            assert self.config.mlp is not None
            return partial(
                self._feed_forward, layer.up_proj, layer.down_proj, self.config.mlp
            )
        return partial(self._moe, layer)

    def _mamba(
        self,
        layer: MambaParameters,
        pool: int,
        hidden: Hidden,
        batch: BatchMetadata,
        caches: Caches,
    ) -> Hidden:
        """Project, convolve, scan, gate and norm, project back."""
        config, components = self.mamba, self.components
        assert config is not None
        sizes = [config.inner_size, config.conv_channels, config.num_heads]
        gate, channels, dt = self._linear(hidden, layer.in_proj).split(sizes, dim=1)
        conv = layer.conv_weight, layer.conv_bias, caches.conv[pool]
        convolved = _by_kind(
            lambda span: components.conv_decode(channels[span], *conv, batch),
            lambda span: components.conv_prefill(channels[span], *conv, batch),
            batch,
        )
        tokens, scan = _cut(convolved, dt, config), (layer, config, caches.ssm[pool])
        scanned = _by_kind(
            lambda span: components.scan_decode(_take(tokens, span), *scan, batch),
            lambda span: components.scan_prefill(_take(tokens, span), *scan, batch),
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
        layer: AttentionParameters,
        pool: int,
        hidden: Hidden,
        batch: BatchMetadata,
        caches: Caches,
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
        blocks = caches.kv[0, pool], caches.kv[1, pool]
        given = keys, values, *blocks, batch.kv_index
        if config.rotary is None:
            components.append_kv(*given)
        else:
            queries = components.append_rotary_kv(
                queries, *given, batch.positions, config.rotary
            )
        scale = config.score_scale
        attended = _by_kind(
            lambda span: components.attend_decode(queries[span], *blocks, scale, batch),
            lambda span: components.attend_prefill(
                queries[span], *blocks, scale, batch
            ),
            batch,
        )
        return self._linear(attended.flatten(1), layer.o_proj)

    def _norm_heads(self, heads: Tensor, weight: NormWeight) -> Tensor:
        """Norm each head of each token on its own."""
        rows = self.components.rms_norm(
            heads.flatten(0, 1), weight, self.config.norm_eps
        )
        return rows.view(heads.shape)

    def _feed_forward(
        self,
        up_proj: LinearParameters,
        down_proj: LinearParameters,
        config: MlpConfig | MoeConfig,
        hidden: Hidden,
        *_: Any,
    ) -> Hidden:
        """Project up, activate, project down."""
        components = self.components
        function = components.activate_gated if config.gated else components.activate
        inner = function(self._linear(hidden, up_proj), config.activation)
        return self._linear(inner, down_proj)

    def _moe(
        self, layer: MoeParameters, hidden: Hidden, batch: BatchMetadata, _: Caches
    ) -> Hidden:
        """Add up the routed experts and the shared one, which need not wait in turn."""
        config = self.config.moe
        assert config is not None
        if layer.shared_up is None or layer.shared_down is None:
            return self._routed(layer, config, hidden, batch)
        shared = layer.shared_up, layer.shared_down, config
        return torch.add(
            *self._run_both(
                lambda: self._routed(layer, config, hidden, batch),
                lambda: self._feed_forward(*shared, hidden),
            )
        )

    def _run_both(
        self, first: Callable[[], Tensor], second: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute two things that do not need each other, one after the other."""
        return first(), second()

    def _routed(
        self,
        layer: MoeParameters,
        config: MoeConfig,
        hidden: Hidden,
        batch: BatchMetadata,
    ) -> Hidden:
        """Send tokens through their experts, in the latent width if there is one."""
        expert_ids, expert_weights = self.components.route(
            hidden, layer.router, layer.correction, config, batch.token_mask
        )
        inputs = (
            self._linear(hidden, layer.latent_down) if layer.latent_down else hidden
        )
        routed = self.components.apply_experts(
            inputs,
            expert_ids,
            expert_weights,
            layer.experts_up,
            layer.experts_down,
            config,
        )
        return self._linear(routed, layer.latent_up) if layer.latent_up else routed

    def _linear(self, inputs: Tensor, parameters: LinearParameters) -> Tensor:
        """Multiply by a weight and add its bias, if any."""
        return self.components.linear(inputs, parameters.weight, parameters.bias)


def _times(values: Tensor, factor: float) -> Tensor:
    """Multiply by a factor of the model's, which most models do not have."""
    return values if factor == 1 else values * factor


def _cut(convolved: Tensor, dt: Tensor, config: MambaConfig) -> ScanTokens:
    """View convolved channels as x, B and C, by heads and groups."""
    states = config.num_groups * config.state_size
    x, *projections = convolved.split([config.inner_size, states, states], dim=1)
    B, C = (part.unflatten(1, (config.num_groups, -1)) for part in projections)
    return ScanTokens(x.unflatten(1, (config.num_heads, -1)), dt, B, C)


def _take(tokens: ScanTokens, span: slice) -> ScanTokens:
    """View a range of tokens."""
    return ScanTokens(*(part[span] for part in tokens))


def _by_kind(
    decode: Callable[[slice], Tensor],
    prefill: Callable[[slice], Tensor],
    batch: BatchMetadata,
) -> Tensor:
    """Run either kind on its tokens; a step of one kind is spared the copy."""
    shape = batch.padded_shape
    if not shape.prefill_tokens:
        return decode(slice(None))
    if not shape.decode_requests:
        return prefill(slice(None))
    first = shape.decode_requests
    return torch.cat((decode(slice(first)), prefill(slice(first, None))))
