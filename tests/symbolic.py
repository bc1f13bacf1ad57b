"""A model without arithmetic: its pools hold the tokens themselves, in disguise.

A key is a token, a value is its position, a conv window is the last tokens, and an SSM
state is a running hash of all tokens with their count. Logits after a token mix all
that a real model would have read. So one wrong state, block or position changes them,
whatever the weights, and many traces take no longer than a few with a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.blocks import num_blocks_for
from lockstep.config import AttentionConfig, MambaConfig, ModelConfig, Sizes
from lockstep.interfaces import Components
from lockstep.memory import Caches
from lockstep.request import SamplingParams

from .factories import make_draws

VOCAB = 13
#: Small enough that every product below is exact in float64, and the hash in float32.
MODULUS = 1_048_573

WINDOW = 3


def model_config(layer_pattern: str) -> ModelConfig:
    """Return a model with some or all of the pools."""
    return ModelConfig(
        family="symbolic",
        layer_pattern=layer_pattern,
        vocab_size=VOCAB,
        hidden_size=1,
        max_positions=256,
        eos_token_ids=(VOCAB - 1,),
        mamba=MambaConfig(
            num_heads=1, head_dim=1, state_size=2, num_groups=1, scan_chunk_size=16
        ),
        attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=1),
    )


def advance(state: np.ndarray, token: int) -> np.ndarray:
    """Take one token into a state: hash and count."""
    return np.array([(state[0] * 31 + token + 1) % MODULUS, state[1] + 1])


def slide(window: np.ndarray, token: int) -> np.ndarray:
    """Take one token into a conv window."""
    return np.append(window[1:], token + 1.0)


def logits_of(
    state: np.ndarray, window: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Mix everything that a token sees into its logits; NaN stays NaN."""
    places = np.arange(len(keys)) % 1009 + 1
    attended = ((keys * 7919 + values * 104_729 + 1) % 1009 * places).sum()
    mixed = state[0] + state[1] * 101 + window @ np.array([3.0, 5.0, 7.0]) + attended
    return (mixed * np.arange(1, VOCAB + 1) ** 2) % 9973 / 997


class SymbolicModel:
    """Stands in for `Model`; reads and writes the pools through the same arrays."""

    def __init__(
        self,
        model_config: ModelConfig,
        sizes: Sizes,
        parameters: object,
        components: Components,
        device: torch.device,
    ) -> None:
        """Keep the sizes.

        Args:
            model_config: Says which pools there are.
            sizes: The engine's sizes.
            parameters: Unused.
            components: Copies of states go through them.
            device: Unused.
        """
        self.sizes = sizes
        self.has_states = model_config.num_mamba_layers > 0
        self.has_blocks = model_config.num_attention_layers > 0
        self.components = components

    def forward(self, batch: BatchMetadata, caches: Caches) -> Tensor:
        """Compute one step; see `lockstep.reference.model.Model.forward`."""
        tokens = batch.token_ids.tolist()
        for token, position, index in zip(
            tokens, batch.positions.tolist(), batch.kv_index.tolist(), strict=True
        ):
            block, offset = divmod(index, self.sizes.block_size)
            caches.kv[0, :, block, offset] = token
            caches.kv[1, :, block, offset] = position
        logits = [np.zeros(VOCAB)] * len(tokens)
        for row, (span, source, target, kept) in enumerate(self._rows(batch)):
            state, window = self._load(caches, source)
            context = batch.context_lens.tolist()[row]
            keys, values = self._gather(batch.block_tables[row], context, caches)
            for index in span:
                if self.has_states:
                    state = advance(state, tokens[index])
                    window = slide(window, tokens[index])
                seen = context - (span.stop - 1 - index)
                logits[index] = logits_of(state, window, keys[:seen], values[:seen])
                for slot in kept.get(index + 1, []):
                    _store(caches, slot, state, window)
            _store(caches, target, state, window)
        self.components.copy_states(
            caches,
            batch.decode_slot_ids,
            batch.decode_snapshot_slot_ids,
            self.sizes.dummy_slot,
        )
        return torch.tensor(np.array(logits), dtype=torch.float32)[batch.logit_index]

    def _rows(
        self, batch: BatchMetadata
    ) -> list[tuple[range, int, int, dict[int, list[int]]]]:
        """List the rows: tokens, slot to start from, slot to write, states to keep."""
        decodes = batch.num_decode_tokens
        rows: list[tuple[range, int, int, dict[int, list[int]]]] = [
            (range(index, index + 1), slot, slot, {})
            for index, slot in enumerate(batch.decode_slot_ids.tolist())
        ]
        bounds = [decodes + offset for offset in batch.cu_prefill_lens.tolist()]
        kept: list[dict[int, list[int]]] = [{} for _ in bounds[1:]]
        for row, end, slot in zip(
            batch.snapshot_rows.tolist(),
            batch.snapshot_ends.tolist(),
            batch.snapshot_slot_ids.tolist(),
            strict=True,
        ):
            kept[row].setdefault(decodes + end, []).append(slot)
        initial = batch.initial_slot_ids.tolist()
        live = batch.prefill_slot_ids.tolist()
        for row, span in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            rows.append((range(*span), initial[row], live[row], kept[row]))
        return rows

    def _load(self, caches: Caches, slot: int) -> tuple[np.ndarray, np.ndarray]:
        if not self.has_states:
            return np.zeros(2), np.zeros(WINDOW)
        state = caches.ssm[0, slot].flatten()[:2].double().numpy().copy()
        return state, caches.conv[0, slot, 0].double().numpy().copy()

    def _gather(
        self, table: Tensor, context: int, caches: Caches
    ) -> tuple[np.ndarray, np.ndarray]:
        if not self.has_blocks:
            return np.zeros(0), np.zeros(0)
        blocks = table[: num_blocks_for(context, self.sizes.block_size)]
        both = caches.kv[:, 0, blocks].flatten(1)[:, :context].double().numpy()
        return both[0], both[1]


def _store(caches: Caches, slot: int, state: np.ndarray, window: np.ndarray) -> None:
    caches.ssm[:, slot] = torch.tensor(state, dtype=torch.float32)
    caches.conv[:, slot] = torch.tensor(window, dtype=torch.float32)


def serve_alone(
    config: ModelConfig,
    components: Any,
    prompt: Sequence[int],
    sampling: SamplingParams,
) -> tuple[list[int], Tensor]:
    """Say what a request must give: its tokens, and log-probabilities by position.

    Args:
        config: Says which pools there are.
        components: For log-probabilities and draws.
        prompt: The prompt.
        sampling: How tokens are drawn.
    """
    tokens = list(prompt)
    state, window = np.zeros(2), np.zeros(WINDOW)
    rows: list[Tensor] = []
    ends = set(sampling.stop_token_ids)
    ends.update(() if sampling.ignore_eos else config.eos_token_ids)
    while True:
        position = len(rows)
        if config.num_mamba_layers:
            state = advance(state, tokens[position])
            window = slide(window, tokens[position])
        seen = position + 1 if config.num_attention_layers else 0
        keys, values = np.array(tokens[:seen], float), np.arange(float(seen))
        logits = torch.tensor(
            logits_of(state, window, keys, values)[None], dtype=torch.float32
        )
        rows.append(components.log_probabilities(logits)[0])
        if position + 1 < len(tokens):
            continue
        is_short = len(tokens) - len(prompt) < sampling.min_tokens
        draws = make_draws(
            1,
            temperatures=sampling.temperature,
            top_ks=sampling.top_k or 0,
            top_ps=sampling.top_p,
            min_ps=sampling.min_p,
            seeds=sampling.seed,
            positions=position + 1,
            banned_ids=[list(ends) if is_short else []],
        )
        tokens.append(int(components.sample(logits, draws)))
        generated = tokens[len(prompt) :]
        if tokens[-1] in ends or len(generated) == sampling.max_tokens:
            return generated, torch.stack(rows)
