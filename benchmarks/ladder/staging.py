"""States at block boundaries on the way through a staging buffer.

What it was: a layer wrote the states that were worth keeping into rows of a fixed
buffer, so that a graph could be captured; after the forward pass they were copied from
there into the slots that keep them.

Why it was slow: each state is written twice and read twice, and rows are copied that
hold nothing. First there were three rows for each request that might run, whatever the
batch; then three for each prefill row of the padded shape. The buffer takes as much
memory as that many snapshots would. Copied one by one, for each state and layer, it
took hundreds of launches besides.

What replaced it: the scan writes each state straight into its slot, in as many rows as
the padded shape has prompts (`optimized/scan.py`).
"""

# An older form of a module is made of that module's parts.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig, ModelConfig, Sizes
from lockstep.interfaces import Components
from lockstep.memory import Caches
from lockstep.optimized import model, scan
from lockstep.parameters import MambaParameters, Parameters
from lockstep.shapes import Logits, ScanInputs, SsmStates

#: States that a prefill row stores at most.
_MOST_SNAPSHOTS = 3


class ModelByRequests(model.Model):
    """Three rows of staging for each request that might run."""

    def __init__(
        self,
        model_config: ModelConfig,
        sizes: Sizes,
        parameters: Parameters,
        components: Components,
        device: torch.device,
    ) -> None:
        """Scan into the staging buffer, whichever scan was asked for."""
        parts = replace(components, scan_prefill=self._scan_prefill)
        super().__init__(model_config, sizes, parameters, parts, device)
        self._staging = torch.empty(0)
        self._layer = 0

    @torch.no_grad()
    def forward(self, batch: BatchMetadata, caches: Caches) -> Logits:
        """Run all layers, then copy what they have staged."""
        if not len(self._staging):
            num_rows = _MOST_SNAPSHOTS * self.sizes.max_requests
            layers, _, *state = caches.ssm.shape
            self._staging = caches.ssm.new_zeros(layers, num_rows, *state)
        self._layer = 0
        self._prepare(batch)
        logits = super().forward(batch, caches)
        if batch.padded_shape.prefill_requests:
            self._commit(batch, caches)
        return logits

    def _prepare(self, batch: BatchMetadata) -> None:
        """Get ready what all layers use."""

    def _num_rows(self, batch: BatchMetadata) -> int:
        """Count the rows of staging that a step writes: all."""
        return self._staging.shape[1]

    def _commit(self, batch: BatchMetadata, caches: Caches) -> None:
        """Copy the rows that hold states into slots, all layers at once."""
        slots = batch.snapshot_slot_ids
        caches.ssm[:, slots] = self._staging[:, : len(slots)]

    def _scan_prefill(
        self,
        tokens: ScanTokens,
        parameters: MambaParameters,
        config: MambaConfig,
        ssm_states: SsmStates,
        batch: BatchMetadata,
    ) -> ScanInputs:
        """Scan as ever, with this layer's rows as the place for states."""
        rows = self._staging[self._layer, : self._num_rows(batch)]
        frame = _StagingFrame(rows, batch, config.scan_chunk_size, len(tokens.x))
        self._layer += 1
        return scan._scan(frame, tokens, parameters, config, ssm_states)


class ModelByPrefills(ModelByRequests):
    """Three rows for each prefill row of the padded shape."""

    def _num_rows(self, batch: BatchMetadata) -> int:
        """Count the rows of staging that the shape may need."""
        return _MOST_SNAPSHOTS * batch.padded_shape.prefill_requests


class ModelWithLoop(ModelByRequests):
    """Staged states copied one by one, each layer by itself."""

    def _commit(self, batch: BatchMetadata, caches: Caches) -> None:
        """Read the slots from the device, then copy."""
        slots = batch.snapshot_slot_ids[: batch.num_snapshots].tolist()
        for row, slot in enumerate(slots):
            for layer, staged in zip(caches.ssm, self._staging, strict=True):
                layer[slot] = staged[row]


class _StagingFrame(scan._Frame):
    """Scan chunks whose states are staged."""

    def __init__(self, rows: Tensor, *args: Any) -> None:
        super().__init__(*args)
        self.rows = rows

    def store(self, ends: Tensor, ssm_states: Tensor) -> None:
        """Write final states to live slots, and snapshots to rows of staging.

        Rows beyond the snapshots take the first chunk's state, which nobody reads.
        """
        chunks = self.batch.snapshot_scan_chunks
        chunks = functional.pad(chunks, (0, len(self.rows) - len(chunks)))
        self.rows.copy_(ends[chunks])
        live = ends[self.batch.last_scan_chunks].to(ssm_states.dtype)
        ssm_states[self.batch.prefill_slot_ids] = live
