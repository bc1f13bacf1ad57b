"""Counts what the steps of an engine ask of the host and of the device.

Reads of device tensors by the host are found as they happen, on any device, by two
nets: what the host calls on a tensor by name, which on a CPU may bypass all else; and
the operations beneath, whoever calls them, whose results or shapes depend on the
numbers in a tensor. Launches and copies are those that the profiler sees.
"""

# Torch has no public name for what sets its modes aside.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

#: Ways to get at numbers that reach no operation, at least not on a CPU.
METHODS = ("tolist", "cpu", "numpy", "__array__")

#: Operations that wait for the device, by the name of what calls them.
OPERATIONS = {
    "_local_scalar_dense": "item",
    "allclose": "allclose",
    "bincount": "bincount",
    "equal": "equal",
    "masked_select": "masked_select",
    "nonzero": "nonzero",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_consecutive": "unique_consecutive",
    "unique_dim": "unique",
}

#: Operations that take indices, which are as many as are true if they are booleans.
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")

#: Beginnings of the names of calls that start kernels; a graph's replay is one call.
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cudaGraphLaunch",
    "cuLaunchKernel",
    "cuLaunchCooperativeKernel",
    "cuGraphLaunch",
)


class Watch(TorchDispatchMode):
    """Sees every operation, also those that others are made of.

    Attributes:
        operations: How many there were.
    """

    def __init__(
        self, report: Callable[[str], None], report_copy: Callable[[str], None] | None
    ) -> None:
        """Name who is told of reads, and of copies to the device, by the call."""
        super().__init__()
        self.report, self.report_copy = report, report_copy
        self.operations = 0

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method that reports its call, and no more of what is beneath it."""
        original = getattr(Tensor, name)

        def reporting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.report(name)
            with _python_dispatch._disable_current_modes():
                return original(tensor, *args, **kwargs)

        return reporting

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Report an operation if it reads, then run it."""
        kwargs = kwargs or {}
        self.operations += 1
        name = _read_by(func, args, kwargs)
        if name:
            self.report(name)
        if self.report_copy and (copied := _copied_by(func, args, kwargs)):
            self.report_copy(copied)
        return func(*args, **kwargs)


@contextmanager
def watching(
    report: Callable[[str], None], report_copy: Callable[[str], None] | None = None
) -> Generator[Watch]:
    """Report every read of a tensor by the host, at the call.

    If asked, report copies to the device that wait for it, too. On a CPU these are not
    seen, but what they begin with is: a tensor that is made of the host's numbers.
    """
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(report, report_copy))
        for name in METHODS:
            stack.enter_context(patch.object(Tensor, name, watch.method(name)))
        yield watch


@dataclass
class Counts:
    """What some steps asked for.

    Attributes:
        host_reads: Reads of tensors by the host.
        operations: Operations of torch that were dispatched; those that a graph holds
            are not, and a Triton kernel is none.
        launches: Calls that started kernels; None where no profiler sees them.
        kernels: Kernels that ran, those within graphs too; None likewise.
        copies: Copies between host and device, either way; None likewise.
        copied_bytes: Bytes of these; None likewise.
        why_none: Why there is no more than reads and operations.
        reads: Every read, by the name of the call.
    """

    host_reads: int = 0
    operations: int = 0
    launches: int | None = None
    kernels: int | None = None
    copies: int | None = None
    copied_bytes: int | None = None
    why_none: str = ""
    reads: list[str] = field(default_factory=list[str])


@contextmanager
def counting(device: torch.device) -> Generator[Counts]:
    """Count what happens meanwhile; the counts are there at the end.

    On a GPU the profiler stays attached from then on, since taking it away and back
    does harm to graphs; so what is to be timed is timed before.
    """
    counts, profiler = Counts(), None
    with ExitStack() as stack:
        if device.type == "cuda":
            os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
            torch.cuda.synchronize(device)
            profiler = stack.enter_context(profile(activities=[ProfilerActivity.CUDA]))
        watch = stack.enter_context(watching(counts.reads.append))
        yield counts
        if profiler is not None:
            torch.cuda.synchronize(device)
    counts.host_reads, counts.operations = len(counts.reads), watch.operations
    if profiler is None:
        counts.why_none = f"{device.type} has no kernels to launch and nothing to copy"
        return
    seen = summarize(read_trace(profiler))
    if seen.kernels:
        counts.launches, counts.kernels = seen.launches, seen.kernels
        counts.copies, counts.copied_bytes = seen.copies, seen.copied_bytes
    else:
        counts.why_none = "the profiler saw no kernels: CUPTI is missing or forbidden"


def read_trace(profiler: Any) -> list[dict[str, Any]]:
    """Return the events that a profiler recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if "cat" in event]


class Seen(NamedTuple):
    """What a profiler saw, as of `Counts`."""

    launches: int
    kernels: int
    copies: int
    copied_bytes: int


def summarize(events: Iterable[dict[str, Any]]) -> Seen:
    """Count launches, kernels, and copies between host and device.

    Kernels that were started together share a number, by which launches are counted
    where the calls themselves were not seen.
    """
    launches = kernels = copies = copied = 0
    together: set[Any] = set()
    for event in events:
        kind, name, more = event["cat"], event["name"], event.get("args", {})
        if kind in ("cuda_runtime", "cuda_driver"):
            launches += name.startswith(LAUNCHES)
        elif kind == "kernel":
            kernels += 1
            together.add(more.get("correlation"))
        elif kind == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            copies += 1
            copied += int(more.get("bytes", 0))
    return Seen(launches or len(together), kernels, copies, copied)


def _read_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Name the call that makes an operation wait for the device, if it does."""
    name = func.overloadpacket.__name__
    if name in OPERATIONS:
        return OPERATIONS[name]
    if name in INDEXING and any(
        index is not None and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    ):
        return "boolean mask"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave"
    if name == "_to_copy" and _leaves(args[0], kwargs.get("device")):
        return "to"
    if name == "copy_" and _leaves(args[1], args[0].device):
        return "copy_"
    return None


def _copied_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Name the call that copies the host's numbers to the device, and waits for it."""
    name = func.overloadpacket.__name__
    if name == "lift_fresh" and args[0].dim():
        return "tensor"
    if name not in ("_to_copy", "copy_"):
        return None
    target, source = kwargs.get("device"), args[0]
    if name == "copy_":
        target, source = args[0].device, args[1]
    if target is None or target.type == "cpu" or source.device.type != "cpu":
        return None
    is_free = kwargs.get("non_blocking", name == "copy_" and args[2:] == (True,))
    return None if is_free and source.is_pinned() else name.strip("_")


def _leaves(tensor: Tensor, target: torch.device | None) -> bool:
    """Tell whether a copy takes a tensor from a device to the host."""
    return target is not None and tensor.device.type != "cpu" and target.type == "cpu"
