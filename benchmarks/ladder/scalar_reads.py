"""Pools whose tables lie on the device and are read one number at a time.

What it was: the engine kept counts of holders, times of use and stacks of free ids in
tensors beside the caches, as if the model needed them.

Why it was slow: every question (is this block held? what was used longest ago?) reads a
scalar, and each such read waits until the device has done all that it was given before.
A step asks hundreds.

What replaced it: tables on the host, in numpy arrays that one call reads whole
(`optimized/kv_blocks.py`, `optimized/state_slots.py`). The device is told the ids that
come of it, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from lockstep.config import Eviction
from lockstep.reference import kv_blocks, state_slots

_EMPTY = -1


class BlockPool(kv_blocks.BlockPool):
    """The reference's pool; all tables but the hashes are tensors."""

    def __init__(self, num_blocks: int, eviction: Eviction) -> None:
        """Put the tables onto the device."""
        self._on_device = dict.fromkeys(("holders", "parents", "last_use"), num_blocks)
        super().__init__(num_blocks, eviction)

    def __setattr__(self, name: str, value: Any) -> None:
        """Copy what is set into tensors, where it belongs there."""
        super().__setattr__(name, _stored(self, name, value))


class StateSlots(state_slots.StateSlots):
    """The reference's slots; pins, times of use and free ids are tensors."""

    def __init__(self, max_requests: int, snapshot_slots: int) -> None:
        """Put the tables onto the device."""
        num_slots = max_requests + snapshot_slots
        self._on_device = dict.fromkeys(("pins", "last_use"), num_slots)
        super().__init__(max_requests, snapshot_slots)

    def __setattr__(self, name: str, value: Any) -> None:
        """Copy what is set into tensors, where it belongs there."""
        super().__setattr__(name, _stored(self, name, value))


class _Table(MutableMapping[int, int]):
    """A dictionary from ids to numbers of which each has its place in a tensor."""

    def __init__(self, size: int, values: Mapping[int, int]) -> None:
        self._values = torch.full((size,), _EMPTY, device=_device())
        self.update(values)

    def __getitem__(self, key: int | None) -> int:
        # The pools also ask for the place of what has none.
        value = _EMPTY if key is None else int(self._values[key].item())
        if value == _EMPTY:
            raise KeyError(key)
        return value

    def __setitem__(self, key: int, value: int) -> None:
        self._values[key] = value

    def __delitem__(self, key: int) -> None:
        self._values[key] = _EMPTY

    def __iter__(self) -> Iterator[int]:
        return (key for key in range(len(self._values)) if key in self)

    def __len__(self) -> int:
        return int((self._values != _EMPTY).sum().item())

    def __ior__(self, other: Mapping[int, int]) -> _Table:
        self.update(other)
        return self


class _Stack(Sequence[int]):
    """A list of ids in a tensor that has room for all of them."""

    def __init__(self, size: int, values: Sequence[int]) -> None:
        self._values = torch.full((size,), _EMPTY, device=_device())
        self._count = 0
        for value in values:
            self.append(value)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return int(self._values[index].item())

    def __len__(self) -> int:
        return self._count

    def append(self, value: int) -> None:
        """Put an id on top."""
        self._values[self._count] = value
        self._count += 1

    def pop(self) -> int:
        """Take the id on top."""
        value = self[self._count - 1]
        self._count -= 1
        return value


def _stored(pool: Any, name: str, value: Any) -> Any:
    """Return a table or a stack of free ids as a tensor, anything else as it is."""
    if name.startswith("free"):
        return _Stack(max(pool._on_device.values()), value)
    if name != "_on_device" and name in pool._on_device:
        return _Table(pool._on_device[name], value)
    return value


def _device() -> torch.device:
    """Return the device that a step would wait for: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
