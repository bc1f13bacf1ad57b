"""A model that computes shared experts beside the routed ones, on another stream.

Routed experts are many small products that leave much of a GPU idle; the shared one
needs nothing of them until both are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import model


class Model(model.Model):
    """The same model; its MoE layers fork and join."""

    def __init__(self, *args: Any) -> None:
        """Make the stream; the arguments are those of the class itself."""
        super().__init__(*args)
        self._stream = torch.cuda.Stream(self.device)

    def _run_both(
        self, first: Callable[[], Tensor], second: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute the second on the side stream; both are done when this is joined.

        The allocator is told that the result is used here, or it might hand the memory
        out again while the side stream still writes it.
        """
        main = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            beside = second()
        result = first()
        main.wait_stream(self._stream)
        beside.record_stream(main)
        return result, beside
