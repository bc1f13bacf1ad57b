"""The replaceable parts of an engine, reached through one object.

A *component* is a function or class of a mirrored module. `Components` has one field
for each; an engine calls through it, so that any part can be replaced for one engine
alone: ``LLM(..., components={"scan.scan_prefill": my_scan})``. Signatures are those of
the modules, the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from torch import Tensor

from lockstep.shapes import ExpertIds, ExpertWeights


def _in(module: str) -> Any:
    return field(metadata={"module": module})


@dataclass(frozen=True)
class Components:
    """Every replaceable function and class, by name.

    Bookkeeping classes come first, then what a forward pass calls, in its order.
    """

    Scheduler: Callable[..., Any] = _in("scheduler")
    PrefixCache: Callable[..., Any] = _in("prefix_cache")
    BlockPool: Callable[..., Any] = _in("kv_blocks")
    StateSlots: Callable[..., Any] = _in("state_slots")
    MetadataBuilder: Callable[..., Any] = _in("metadata")
    Model: Callable[..., Any] = _in("model")
    rms_norm: Callable[..., Tensor] = _in("norm")
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = _in("norm")
    gated_group_rms_norm: Callable[..., Tensor] = _in("norm")
    linear: Callable[..., Tensor] = _in("linear")
    conv_decode: Callable[..., Tensor] = _in("conv1d")
    conv_prefill: Callable[..., Tensor] = _in("conv1d")
    scan_decode: Callable[..., Tensor] = _in("scan")
    scan_prefill: Callable[..., Tensor] = _in("scan")
    append_kv: Callable[..., None] = _in("attention")
    append_rotary_kv: Callable[..., Tensor] = _in("attention")
    attend_decode: Callable[..., Tensor] = _in("attention")
    attend_prefill: Callable[..., Tensor] = _in("attention")
    activate: Callable[..., Tensor] = _in("mlp")
    activate_gated: Callable[..., Tensor] = _in("mlp")
    route: Callable[..., tuple[ExpertIds, ExpertWeights]] = _in("moe")
    apply_experts: Callable[..., Tensor] = _in("moe")
    copy_states: Callable[..., None] = _in("snapshots")
    sample: Callable[..., Tensor] = _in("sampler")
    log_probabilities: Callable[..., Tensor] = _in("sampler")


def component_key(entry: Field[Any]) -> str:
    """Return a component's key, ``module.symbol``."""
    return f"{entry.metadata['module']}.{entry.name}"


def component_keys() -> list[str]:
    """List the keys of all components."""
    return [component_key(entry) for entry in fields(Components)]
