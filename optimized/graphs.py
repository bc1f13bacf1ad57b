"""Forward passes at padded shapes: run as they are, or captured once and replayed.

A step whose arrays have the extents of a shape in `Sizes.graph_shapes` finds them at
fixed addresses, whatever it is about; a graph captured from them computes any such
step. All graphs share one memory pool, since no two run at once, and hand their logits
over in one buffer.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.config import GraphMode
from lockstep.plan import BatchShape

#: What a capture takes besides the memory of a pass: workspaces of libraries on its own
#: stream, and what the driver keeps of graphs.
_CAPTURE_BYTES = 256 * 1024**2


class Forward(NamedTuple):
    """What a forward pass gave, and how it was run.

    Attributes:
        logits: Valid until the next pass.
        mode: ``eager``, ``padded`` or ``graph``.
        eager_reason: Why it ran eagerly at its real size though shapes are padded.
    """

    logits: Tensor
    mode: str
    eager_reason: str


class _Extents(NamedTuple):
    """What tells the arrays of one graph from those of others."""

    shape: BatchShape
    num_logits: int
    banned_width: int

    @classmethod
    def of(cls, batch: BatchMetadata) -> _Extents:
        return cls(
            batch.padded_shape, len(batch.logit_index), batch.draws.banned_ids.shape[1]
        )


class GraphRunner:
    """Runs each step in the way its shape allows, and says so.

    Attributes:
        mode: What was asked for.
        eager_steps: How many steps ran eagerly though graphs were asked for, by reason.
    """

    def __init__(
        self,
        mode: GraphMode,
        forward: Callable[[BatchMetadata], Tensor],
        pad: Callable[[BatchShape], BatchMetadata],
        shapes: Sequence[BatchShape],
    ) -> None:
        """Note what has fixed addresses; nothing is captured yet.

        Args:
            mode: What was asked for.
            forward: The model.
            pad: Makes a step of padding alone, whose arrays are those that every step
                of the shape will have; until the next step is made.
            shapes: All padded shapes, ascending.
        """
        self.mode: GraphMode = mode
        self.eager_steps = Counter[str]()
        self._forward = forward
        self._pad = pad
        self._padded = {_Extents.of(pad(shape)) for shape in shapes}
        self._graphs: dict[_Extents, torch.cuda.CUDAGraph] = {}
        self._logits = torch.empty(0)

    def run(self, batch: BatchMetadata) -> Forward:
        """Compute one step."""
        if self.mode == "off":
            return Forward(self._forward(batch), "eager", "")
        extents = _Extents.of(batch)
        if extents not in self._padded:
            reason = self._why_eager(batch)
            self.eager_steps[reason] += 1
            return Forward(self._forward(batch), "eager", reason)
        if extents not in self._graphs:
            return Forward(self._forward(batch), "padded", "")
        self._graphs[extents].replay()
        return Forward(self._logits[: extents.num_logits], "graph", "")

    def capture(self) -> Iterator[BatchShape]:
        """Capture a graph for every shape, the largest first, which sizes the pool.

        Each pass is run once before it is captured: libraries allocate, and kernels are
        compiled, at a first call. Other threads may use the GPU meanwhile, unless they
        wait for all of it.

        Raises:
            torch.OutOfMemoryError: The device is too full; nothing is captured.
        """
        pool = torch.cuda.graph_pool_handle()
        ordered = sorted(self._padded, reverse=True)
        self._check_room(ordered[0])
        for extents in ordered:
            batch = self._pad(extents.shape)
            logits = self._forward(batch)
            if len(logits) > len(self._logits):
                self._logits = torch.zeros_like(logits)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with (
                _no_garbage_collected(),
                torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
            ):
                logits = self._forward(batch)
                self._logits[: len(logits)].copy_(logits)
            self._graphs[extents] = graph
            del logits
            yield extents.shape

    def _check_room(self, largest: _Extents) -> None:
        """Run the largest pass, and see that there is its memory for graphs to keep.

        A capture that runs out of memory may leave the process unable to go on.
        """
        used = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._forward(self._pad(largest.shape))
        torch.cuda.synchronize()
        needed = torch.cuda.max_memory_allocated() - used + _CAPTURE_BYTES
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < needed:
            raise torch.OutOfMemoryError(
                f"out of memory for graphs: {needed / 1024**3:.2f} GiB needed, "
                f"{free / 1024**3:.2f} free"
            )

    def _why_eager(self, batch: BatchMetadata) -> str:
        """Say what a step needs that no shape has."""
        if self.mode == "decode" and batch.shape.prefill_requests:
            return 'graphs="decode" has none for steps with prompts'
        return "more logits or banned tokens than a graph has room for"


@contextmanager
def _no_garbage_collected() -> Generator[None]:
    """Keep graphs of engines that are garbage: to free one would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def show_progress(captured: Iterator[BatchShape], total: int) -> None:
    """Capture all, under a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    for _ in track(captured, "capturing graphs", total, console=console):
        pass
