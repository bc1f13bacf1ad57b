"""The index arrays of a step, laid out without loops but sent one by one.

What it was: some thirty small arrays, each put onto the device by itself.

Why it was slow: a copy of a few hundred bytes costs the host as much as one of many
thousand, and from memory that is not pinned it waits for the device besides.

What replaced it: one buffer for all of them, and one copy (`optimized/metadata.py`);
for padded steps from pinned memory to a fixed place (`optimized/buffers.py`).
"""

# An older form of a module is made of that module's parts.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.batch import BatchMetadata
from lockstep.optimized import metadata


class MetadataBuilder(metadata.MetadataBuilder):
    """The same arrays in as many copies, at new addresses in every step."""

    def _send(self, real: Any, padded: Any, arrays: Mapping[str, Any]) -> BatchMetadata:
        """Send every array by itself."""
        sent = {
            name: torch.from_numpy(array.copy()).to(self.device)
            for name, array in arrays.items()
        }
        return BatchMetadata(
            shape=real.shape,
            padded_shape=padded.shape,
            num_snapshots=real.snapshots,
            num_logits=real.logits,
            num_samples=real.draws,
            **metadata._with_draws(sent),
        )
