"""Reads of device tensors by the host, found as they happen, on any device.

Two nets: what the host calls on a tensor by name, which on a CPU may bypass all else;
and the operations beneath, whoever calls them, whose results or shapes depend on the
numbers in a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


class HostReadError(AssertionError):
    """The host read a tensor where it must not."""


@contextmanager
def recorded_host_reads() -> Generator[list[str]]:
    """List what the host reads of tensors meanwhile, by the name of the call."""
    reads: list[str] = []
    with _watching(reads.append):
        yield reads


@contextmanager
def no_host_reads() -> Generator[None]:
    """Refuse every read of a tensor by the host.

    Raises:
        HostReadError: At the call, and names it.
    """

    def refuse(name: str) -> None:
        raise HostReadError(f"the host reads a tensor: {name}")

    with _watching(refuse):
        yield


@contextmanager
def _watching(report: Callable[[str], None]) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch, _Watch(report) as watch:
        for name in METHODS:
            patch.setattr(Tensor, name, watch.method(name))
        yield


class _Watch(TorchDispatchMode):
    """Sees every operation, also those that others are made of."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.report = report

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method that reports its call, and no more of what is beneath it."""
        original = getattr(Tensor, name)

        def reporting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.report(name)
            with _disable_current_modes():
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
        name = _read_by(func, args, kwargs)
        if name:
            self.report(name)
        return func(*args, **kwargs)


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


def _leaves(tensor: Tensor, target: torch.device | None) -> bool:
    """Tell whether a copy takes a tensor from a device to the host."""
    return target is not None and tensor.device.type != "cpu" and target.type == "cpu"
