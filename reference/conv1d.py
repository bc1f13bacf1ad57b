"""The causal convolution over time before a Mamba-2 scan, token by token.

Every channel has its own filter over the last ``width`` raw inputs. What a later token
still needs, the last ``width - 1`` of them, is the *conv window* of a state slot.

Inputs enter in the dtype of the pool, those of the present step too, so that a token
finds the same numbers before it whether they were carried in a slot or not.

Source: Gu & Dao 2023, "Mamba", arXiv 2312.00752, section 3.4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import BatchMetadata
from lockstep.shapes import ConvBias, ConvInputs, ConvStates, ConvWeight

from .rows import prefill_rows


def conv_decode(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve one new token of each decode row and slide its window on.

    Args:
        inputs: Raw channels (x, B, C) of the decode tokens.
        weight: Filters; the last tap meets the newest token.
        bias: Added to each channel; None for none.
        conv_states: One layer's windows; the rows' live slots are read and written.
        batch: Names the slots.

    Returns:
        The SiLU of the convolution, in the inputs' dtype.
    """
    outputs = torch.empty_like(inputs)
    for index, slot in enumerate(batch.decode_slot_ids.tolist()):
        history = _history(conv_states[slot], inputs[index : index + 1])
        outputs[index] = _convolve(history, weight, bias)
        conv_states[slot] = history[1:].T
    return outputs


def conv_prefill(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve the tokens of each prefill row, store windows, and write the last one.

    A row starts from the window of its initial slot, which stays as it is unless it is
    the row's live slot too. The window after a token is the tail of the initial window
    and the row's inputs up to it, so a slice shorter than the window still carries the
    older inputs on.

    Args:
        inputs: Raw channels (x, B, C) of the prefill tokens.
        weight: Filters; the last tap meets the newest token.
        bias: Added to each channel; None for none.
        conv_states: One layer's windows; live and snapshot slots are written.
        batch: Names rows, slots and snapshots.

    Returns:
        The SiLU of the convolution, in the inputs' dtype.
    """
    outputs = torch.empty_like(inputs)
    width = weight.shape[1]
    for row in prefill_rows(batch):
        history = _history(conv_states[row.initial_slot], inputs[row.start : row.end])
        for offset in range(row.start, row.end):
            first = offset - row.start
            outputs[offset] = _convolve(history[first : first + width], weight, bias)
        for end, slot in [*row.snapshots, (row.end, row.live_slot)]:
            first = end - row.start
            conv_states[slot] = history[first : first + width - 1].T
    return outputs


def _history(window: Tensor, inputs: Tensor) -> Tensor:
    """Put a window and the inputs that follow it into one array, oldest first."""
    return torch.cat((window.T, inputs.to(window.dtype)))  # (window + tokens, channels)


def _convolve(taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weigh the last ``width`` inputs of every channel, in float32 or float64."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    products = taps.to(wide, copy=True) * weight.T.to(wide)  # (width, channels)
    total = products.sum(0)
    return functional.silu(total if bias is None else total + bias)
