"""Tokens of padded batches: real ones in their places, NaN in all others."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata


def place(tokens: Tensor, batch: BatchMetadata) -> Tensor:
    """Put the real tokens of a step, decode before prefill, where a batch has them."""
    size = batch.padded_shape.tokens, *tokens.shape[1:]
    placed = torch.full(size, torch.nan, dtype=tokens.dtype)
    placed[batch.token_mask] = tokens
    return placed


def split(placed: Tensor, batch: BatchMetadata) -> tuple[Tensor, Tensor]:
    """Part the tokens of decode rows from those of prefill rows, padding with each."""
    return placed[: batch.num_decode_tokens], placed[batch.num_decode_tokens :]
