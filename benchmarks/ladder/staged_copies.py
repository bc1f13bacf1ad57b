"""States at block boundaries copied through a staging buffer, behind any scan.

What it was, and why it was slow, stands in `staging`, whose forms replace the scan too.
Here the scan stores states as ever, and what staging asked for besides follows it: each
layer gathers states into rows of the buffer, and after the forward pass they are copied
from there into slots. So its price can be told beside the scan that there is today,
whatever that is made of.

How many rows are copied differs: three for each request that might run, three for each
prefill row of the padded shape, or those that hold a state, which the device counts
(`counted_copies`, since it takes Triton).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.ladder import staging
from lockstep.batch import BatchMetadata
from lockstep.config import ModelConfig, Sizes
from lockstep.interfaces import Components
from lockstep.parameters import Parameters


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


class ModelWithLoop(ModelByPrefills):
    """Staged states copied one by one, each layer by itself."""

    _commit = staging.ModelWithLoop._commit
