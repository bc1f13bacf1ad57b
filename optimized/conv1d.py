"""The causal convolution of all rows at once, over one array of history.

Each row's history is its initial window and then its inputs; all histories stand one
after another, and padding tokens behind them:

    window of row 0, inputs of row 0, window of row 1, inputs of row 1, ..., padding

There, every tap of a token lies at a fixed distance from it, and so does the window
after a token, however short the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import BatchMetadata
from lockstep.shapes import ConvBias, ConvInputs, ConvStates, ConvWeight


def conv_decode(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve the tokens of all decode rows, and slide all windows on.

    Cost: three launches a tap and about six more; each window is gathered and
    scattered once.
    """
    windows = conv_states[batch.decode_slot_ids].mT  # (rows, window, channels)
    newest = inputs[:, None].to(windows.dtype)
    history = torch.cat((windows, newest), dim=1)
    conv_states[batch.decode_slot_ids] = history[:, 1:].mT
    return _convolve(history.unbind(1), weight, bias).to(inputs.dtype)


def conv_prefill(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve all tokens of all rows, then store all windows.

    Initial windows are copied before any window is written, so no order of rows could
    matter.

    Cost: four launches a tap and about twenty more, whatever the rows; the history is
    one copy of the inputs in the pool's dtype, and three more are alive in that of the
    arithmetic. Nothing is read back from the device.
    """
    history = _History(inputs, conv_states, batch)
    outputs = _convolve(history.taps(), weight, bias)
    history.store(conv_states)
    return outputs.to(inputs.dtype)


class _History:
    """The histories of all prefill rows in one array."""

    def __init__(
        self, inputs: Tensor, conv_states: Tensor, batch: BatchMetadata
    ) -> None:
        """Lay windows and inputs out."""
        self.batch = batch
        self.window = conv_states.shape[2]
        num_rows = len(batch.initial_slot_ids)
        self.rows = torch.arange(num_rows, device=inputs.device)
        tokens = torch.arange(len(inputs), device=inputs.device)
        rows = torch.searchsorted(batch.cu_prefill_lens[1:], tokens, right=True)
        # Padding tokens come behind the last row, and push nothing aside.
        windows_before = (rows + 1).clamp(max=num_rows)
        self.places = tokens + windows_before * self.window
        begins = self._windows(self.rows, batch.cu_prefill_lens[:-1])
        size = len(inputs) + num_rows * self.window
        self.values = conv_states.new_empty(size, inputs.shape[1])
        self.values[self.places] = inputs.to(conv_states.dtype)
        self.values[begins] = conv_states[batch.initial_slot_ids].mT

    def taps(self) -> Iterable[Tensor]:
        """Yield the inputs that each tap meets, from the oldest to each token's own."""
        for distance in range(self.window, -1, -1):
            yield self.values[self.places - distance]

    def store(self, conv_states: Tensor) -> None:
        """Write the windows at row ends and snapshots straight to their slots."""
        batch = self.batch
        for slots, rows, ends in (
            (batch.prefill_slot_ids, self.rows, batch.cu_prefill_lens[1:]),
            (batch.snapshot_slot_ids, batch.snapshot_rows, batch.snapshot_ends),
        ):
            conv_states[slots] = self.values[self._windows(rows, ends)].mT

    def _windows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Find the windows before some prefill offsets: (many,) to (many, window)."""
        lanes = torch.arange(self.window, device=rows.device)
        return (offsets + rows * self.window)[:, None] + lanes


def _convolve(taps: Iterable[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weigh and add up the inputs that each tap meets, in float32 or float64.

    One tap after the other, so that never all of them are in memory.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    filters = weight.to(wide).unbind(1)
    products = (tap.to(wide) * each for tap, each in zip(taps, filters, strict=True))
    total = reduce(torch.add, products)
    return functional.silu(total if bias is None else total + bias)
