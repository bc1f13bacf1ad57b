"""Poisoned memory around whatever an engine allocates, looked at after every step.

A mode of torch puts each tensor that is made by shape alone (pools, buffers, outputs of
kernels) into the middle of a larger allocation. What lies before and behind it holds a
pattern that no step may change. What is made while a graph is captured has no zones:
graphs share their memory, and each replay may overwrite what others had there. The same
outputs have zones in eager steps of the same padded shapes.

The pattern is NaN in every floating dtype, so that what a kernel reads from there shows
in what it computes. A write further off than a zone is long is for a memory checker.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import ModelConfig
from tests.engines import CPU, Run, drain, make_engine, witness_parameters

PACKAGE = Path(__file__).resolve().parents[1] / "lockstep"
#: Bytes of a zone; more than a block or a slot of a tiny model has. A multiple of what
#: an allocation is aligned to, so that tensors are aligned as they would be.
ZONE = 4096
#: Two bytes that, again and again, are NaN in every dtype, and -1 in none.
PATTERN = (0xF1, 0xFF)
#: Operations that make a tensor from a shape.
FACTORIES = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones",
    "full", "full_like", "new_full",
}  # fmt: skip


class GuardError(AssertionError):
    """Something wrote next to a tensor."""


class _Guarded(NamedTuple):
    """A tensor with its zones.

    Attributes:
        name: The line that made it, and where that stands.
        memory: All bytes.
        size: Bytes of the tensor itself.
    """

    name: str
    memory: Tensor
    size: int

    def zones(self) -> tuple[Tensor, Tensor]:
        """View what lies before the tensor, and what behind it."""
        end = ZONE + self.size
        return self.memory[:ZONE], self.memory[end : end + ZONE]

    def patterns(self) -> tuple[Tensor, Tensor]:
        """Return what the zones should hold: the second may begin within a word."""
        patterns = _patterns(self.memory.device)
        return patterns[0], patterns[self.size % 2]


class Guards(TorchDispatchMode):
    """Surrounds what is allocated while it is entered."""

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self._fixed: list[_Guarded] = []
        self._passing: list[_Guarded] = []

    @property
    def names(self) -> list[str]:
        """Names of all tensors that each check looks at."""
        return [guarded.name for guarded in self._fixed + self._passing]

    def settle(self) -> None:
        """Keep what was made so far for good, and poison all zones, again or at last.

        So what is found later was done later: by a replay, not by what came before.
        """
        self._fixed += self._passing
        self._passing = []
        with torch.inference_mode():
            for guarded in self._fixed:
                for zone, pattern in zip(
                    guarded.zones(), guarded.patterns(), strict=True
                ):
                    zone.copy_(pattern)

    def check(self) -> None:
        """See that nothing was written next to a tensor; then forget passing ones.

        Raises:
            GuardError: Names every tensor next to which something was written, the
                end at which, and how far off.
        """
        found = self._fixed + self._passing
        self._passing = []
        problems: list[str] = []
        for device in {guarded.memory.device for guarded in found}:
            problems += _broken([g for g in found if g.memory.device == device])
        if problems:
            raise GuardError("; ".join(problems))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; what it makes from a shape is moved between two zones."""
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FACTORIES or not made.numel() or made.device.type == "meta":
            return made
        if made.is_cuda and torch.cuda.is_current_stream_capturing():
            return made
        size = made.untyped_storage().nbytes()
        # Even, so that it can be filled with the pattern.
        count = 2 * ZONE + size + size % 2
        memory = torch.empty(count, dtype=torch.uint8, device=made.device)
        words = _patterns(made.device)[0].view(torch.int16)
        memory.view(torch.int16).copy_(words[:1])
        inner = memory[ZONE : ZONE + size].view(made.dtype)
        inner = inner.as_strided(made.shape, made.stride())
        if "empty" not in name:
            inner.copy_(made)
        self._passing.append(_Guarded(_origin(), memory, size))
        return inner


@cache
def _patterns(device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the content of a zone that begins with a word, and of one a byte later."""
    pattern = torch.tensor(PATTERN * (ZONE // 2), dtype=torch.uint8)
    return pattern.to(device), pattern.roll(-1).to(device)


def _broken(found: list[_Guarded]) -> Iterator[str]:
    """Say what is wrong with zones of one device, which are all read at once."""
    zones = torch.stack([zone for guarded in found for zone in guarded.zones()])
    wanted = torch.stack([each for guarded in found for each in guarded.patterns()])
    is_changed = zones != wanted
    for index in is_changed.any(1).nonzero().flatten().tolist():
        changed = is_changed[index].nonzero().flatten().tolist()
        guarded, is_behind = found[index // 2], index % 2
        nearest = changed[0] if is_behind else ZONE - 1 - changed[-1]
        side = "past its end" if is_behind else "before its begin"
        yield f"{guarded.name}: {len(changed)} bytes {side}, {nearest} off"


def _origin() -> str:
    """Find the line of the package that makes a tensor."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            line = linecache.getline(str(path), frame.f_lineno).strip()
            return f"{line} ({path.relative_to(PACKAGE)}:{frame.f_lineno})"
        frame = frame.f_back
    return "(made by a test)"


def make_guarded(
    config: ModelConfig,
    components: dict[str, Any] | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> tuple[Any, Guards]:
    """Build an optimized engine between guards; its weights, only read, have none."""
    witness_parameters(config, device=device)
    guards = Guards()
    with guards:
        engine = make_engine(config, "optimized", components, device, **options)
    guards.settle()
    return engine, guards


def drain_guarded(engine: Any, guards: Guards, run: Run | None = None) -> Run:
    """Run an engine until it has nothing left to do, and check after every step.

    Raises:
        GuardError: From the first step that wrote where it must not.
    """
    with guards:
        return drain(engine, run, lambda _: guards.check())


class Fault(NamedTuple):
    """A component that writes where it must not, and what is to be said of it.

    Attributes:
        key: The component.
        function: What takes its place.
        tensor: The tensor beside which it writes, by the line that makes it.
        end: At which end.
    """

    key: str
    function: Callable[..., Any]
    tensor: str
    end: str


def _append_past_the_pool(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    index: Tensor,
) -> None:
    from lockstep.optimized.kernels.attention import append_kv

    pools = key_blocks, value_blocks
    append_kv(keys, values, *pools, index)
    past = torch.full_like(index[:1], key_blocks.shape[0] * key_blocks.shape[1])
    append_kv(keys[:1], values[:1], *pools, past)


def _copy_states_to(shift: int) -> Callable[..., None]:
    """Copy to a slot counted from the dummy slot, which is the last one."""

    def copy_states(caches: Any, sources: Tensor, targets: Tensor, dummy: int) -> None:
        from lockstep.optimized.kernels import snapshots

        wrong = torch.full_like(targets[:1], dummy + shift)
        snapshots.copy_states(caches, sources, targets, dummy)
        snapshots.copy_states(caches, sources[:1], wrong, dummy)

    return copy_states


def _copy_states_to_slot_before_the_first(
    caches: Any, sources: Tensor, targets: Tensor, dummy: int
) -> None:
    _copy_states_to(-dummy - 1)(caches, sources, targets, dummy)


def _norm_past_the_output(*args: Any) -> Tensor:
    from lockstep.optimized.kernels.norm import rms_norm

    normed = rms_norm(*args)
    write(normed, int(normed.storage_offset()) + normed.numel())
    return normed


def _write_before_the_index_arrays(*args: Any) -> tuple[Tensor, Tensor]:
    from lockstep.optimized.kernels.moe import route

    token_mask = args[4]
    write(token_mask, ZONE - 1)
    return route(*args)


def write(tensor: Tensor, offset: int) -> None:
    """Write into a tensor's allocation, at an offset from its begin, in values."""
    tensor.as_strided((1,), (1,), offset).zero_()


#: Through kernels, since torch's own operations check their indices.
FAULTS = {
    "append_kv writes one row past the pool": Fault(
        "attention.append_kv", _append_past_the_pool, "kv=torch.zeros", "past its end"
    ),
    "copy_states writes slot -1": Fault(
        "snapshots.copy_states",
        _copy_states_to_slot_before_the_first,
        "ssm=torch.zeros",
        "before its begin",
    ),
    "copy_states writes one slot past the last": Fault(
        "snapshots.copy_states", _copy_states_to(1), "conv=torch.zeros", "past its end"
    ),
    "a norm writes past its output": Fault(
        "norm.rms_norm", _norm_past_the_output, "normed = hidden.new_empty",
        "past its end",
    ),
    "something writes before the index arrays": Fault(
        "moe.route", _write_before_the_index_arrays, "self._device = torch.zeros",
        "before its begin",
    ),
}  # fmt: skip
