"""The memory through which the index arrays of padded steps reach the device.

A captured graph reads its inputs at fixed addresses. So the arrays of a padded shape
always lie at the same places of one device buffer, and one copy a step fills it from
pinned host memory. The host writes the next step while that copy may still be under
way, so two host buffers take turns, and each waits for its own last copy: the one made
two steps before, which is done long since where a step's tokens were read in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Array = NDArray[Any]

#: What numpy calls a dtype, torch's name for it.
_DTYPES = {
    name: getattr(torch, name) for name in ("int64", "float32", "float64", "bool")
}
#: Arrays begin at multiples of the largest item.
_ALIGNMENT = 8


class _Views(NamedTuple):
    """The arrays of one shape: in both host buffers, and on the device."""

    hosts: list[dict[str, _Array]]
    device: dict[str, Tensor]
    num_bytes: int


class StepBuffer:
    """One device buffer, and two pinned ones that take turns in filling it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate all three."""
        self._is_cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").pin_memory()
            if self._is_cuda
            else torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
            for _ in range(2)
        ]
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._views: dict[Hashable, _Views] = {}

    def send(self, key: Hashable, arrays: Mapping[str, _Array]) -> dict[str, Tensor]:
        """Copy arrays to their places on the device, without waiting for the copy.

        Args:
            key: Names sizes and dtypes: arrays under one key are always alike.
            arrays: What to send.

        Returns:
            Views of the device buffer, the same ones for a key; their content lasts
            until the next call.
        """
        if key not in self._views:
            self._views[key] = self._lay_out(arrays)
        views = self._views[key]
        self._turn ^= 1
        if (event := self._copied[self._turn]) is not None:
            event.synchronize()
        for name, view in views.hosts[self._turn].items():
            view[...] = arrays[name]
        source = self._hosts[self._turn][: views.num_bytes]
        self._device[: views.num_bytes].copy_(source, non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn] = event = torch.cuda.Event()
            event.record()
        return dict(views.device)

    def _lay_out(self, arrays: Mapping[str, _Array]) -> _Views:
        begins, num_bytes = _places(arrays)
        hosts = [_view_all(host, begins, arrays) for host in self._hosts]
        return _Views(
            [{name: view.numpy() for name, view in host.items()} for host in hosts],
            _view_all(self._device, begins, arrays),
            num_bytes,
        )


def send_once(arrays: Mapping[str, _Array], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to the device as one new buffer, and return their views of it.

    The host goes on meanwhile: torch keeps pinned memory until its copies are done.
    """
    begins, num_bytes = _places(arrays)
    buffer = np.zeros(num_bytes, np.uint8)
    for begin, array in zip(begins, arrays.values(), strict=True):
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        buffer[begin : begin + array.nbytes] = raw
    host = torch.from_numpy(buffer)
    host = host.pin_memory() if device.type == "cuda" else host
    return _view_all(host.to(device, non_blocking=True), begins, arrays)


def count_bytes(arrays: Mapping[str, _Array]) -> int:
    """Count the bytes that arrays take side by side."""
    return _places(arrays)[1]


def _places(arrays: Mapping[str, _Array]) -> tuple[list[int], int]:
    """Return where each array begins, and the end of the last."""
    lens = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    *begins, end = np.cumsum([0, *lens]).tolist()
    return begins, end


def _view_all(
    buffer: Tensor, begins: list[int], arrays: Mapping[str, _Array]
) -> dict[str, Tensor]:
    """View a buffer of bytes as arrays."""
    return {
        name: buffer[begin : begin + array.nbytes]
        .view(_DTYPES[array.dtype.name])
        .view(array.shape)
        for begin, (name, array) in zip(begins, arrays.items(), strict=True)
    }
