"""States at block boundaries copied through a staging buffer, behind any scan.

What it was, and why it was slow, stands in `staging`, whose forms replace the scan too.
Here the scan stores states as ever, and what staging asked for besides follows it: each
layer gathers states into rows of the buffer, and after the forward pass they are copied
from there into slots. So its price can be told beside the scan that there is today,
whatever that is made of.

How many rows are copied differs: three for each request that might run, three for each
prefill row of the padded shape, or those that hold a state, which the device counts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from benchmarks.ladder import staging
from lockstep.batch import BatchMetadata
from lockstep.config import ModelConfig, Sizes
from lockstep.interfaces import Components
from lockstep.memory import Caches
from lockstep.parameters import Parameters

#: Programs that share the copy of a state, and values that each moves at a time.
_SHARES, _TILE = 16, 4096


class ModelByRequests(staging.ModelByRequests):
    """Three rows for each request that might run."""

    def __init__(
        self,
        model_config: ModelConfig,
        sizes: Sizes,
        parameters: Parameters,
        components: Components,
        device: torch.device,
    ) -> None:
        """Put the copy of each layer behind its scan."""
        self._scan = components.scan_prefill
        super().__init__(model_config, sizes, parameters, components, device)

    def _prepare(self, batch: BatchMetadata) -> None:
        """List the slots that the rows are filled from; the last are padding."""
        slots = batch.snapshot_slot_ids
        lack = self._num_rows(batch) - len(slots)
        self._sources = functional.pad(slots, (0, lack), value=self.sizes.dummy_slot)

    def _scan_prefill(
        self, tokens: Any, parameters: Any, config: Any, ssm_states: Tensor, batch: Any
    ) -> Tensor:
        """Scan as ever, then fill this layer's rows."""
        outputs = self._scan(tokens, parameters, config, ssm_states, batch)
        self._stage(ssm_states, batch)
        self._layer += 1
        return outputs

    def _stage(self, ssm_states: Tensor, batch: BatchMetadata) -> None:
        """Gather states, then copy them into the buffer."""
        rows = self._staging[self._layer, : len(self._sources)]
        rows.copy_(ssm_states[self._sources])


class ModelByPrefills(ModelByRequests):
    """Three rows for each prefill row of the padded shape."""

    _num_rows = staging.ModelByPrefills._num_rows


class ModelByCount(ModelByRequests):
    """As many rows as there are states, counted on the device; the rest is skipped."""

    def _prepare(self, batch: BatchMetadata) -> None:
        """Count the states, whose entries come before those of padding."""
        slots = batch.snapshot_slot_ids
        self._count = (slots != self.sizes.dummy_slot).sum()
        self._rows = torch.arange(len(slots), device=slots.device)

    def _stage(self, ssm_states: Tensor, batch: BatchMetadata) -> None:
        """Copy states into the buffer at once."""
        slots, staged = batch.snapshot_slot_ids, self._staging[self._layer]
        copy_rows(ssm_states[None], staged[None], slots, self._rows, self._count)

    def _commit(self, batch: BatchMetadata, caches: Caches) -> None:
        """Copy them into slots, all layers at once."""
        slots = batch.snapshot_slot_ids
        copy_rows(self._staging, caches.ssm, self._rows, slots, self._count)


class ModelWithLoop(ModelByPrefills):
    """Staged states copied one by one, each layer by itself."""

    _commit = staging.ModelWithLoop._commit


def copy_rows(
    source: Tensor,
    target: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    count: Tensor,
) -> None:
    """Copy some rows of every layer, as many as a number on the device says.

    Cost: one launch; programs of other rows end at once.

    Args:
        source: By layer and row, each row contiguous.
        target: Likewise.
        source_rows: Rows to copy.
        target_rows: Where each goes.
        count: How many of these count, from the first.
    """
    layers, rows = len(source), len(source_rows)
    _copy_rows_kernel[(_SHARES, rows, layers)](
        *(source, target, source_rows, target_rows, count),
        *(source.stride(0), target.stride(0)),
        SIZE=source[0, 0].numel(),
        SHARES=_SHARES,
        TILE=_TILE,
        num_warps=8,
    )


@triton.jit
def _copy_rows_kernel(
    source, target, source_rows, target_rows, count, source_stride, target_stride,
    SIZE: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    share, row, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(count):
        return
    source += layer.to(tl.int64) * source_stride + tl.load(source_rows + row) * SIZE
    target += layer.to(tl.int64) * target_stride + tl.load(target_rows + row) * SIZE
    for first in range(share * TILE, SIZE, SHARES * TILE):
        places = first + tl.arange(0, TILE)
        mask = places < SIZE
        tl.store(target + places, tl.load(source + places, mask), mask)
