"""The rungs of the ladder: what each optimization changes, from slow to fast.

A rung takes components from the optimized side, all earlier rungs' included, and sets
options of the engine. So each is a complete engine that differs from the one before in
one idea alone. Forms that a rung replaced for good are kept in `benchmarks.ladder`: an
engine of the same rung with one of these is its before, all else being equal.

The ladder, the documentation and the tests read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.interfaces import component_keys

_LADDER = "benchmarks.ladder"


def _optimized(*keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, "optimized")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: The field's term for the optimization.
        change: What changes, and why that is faster.
        components: For each component that it replaces, ``optimized`` or the place of
            an interim form as ``package.module:symbol``.
        options: Options of `EngineConfig` that it sets; they hold for later rungs too.
        before: Forms that it replaced, slow to fast, by name: for each the components
            that stand in for its own.
        backend: Whose engine runs it.
    """

    name: str
    change: str
    components: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    before: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, Mapping[str, str]]
    )
    backend: str = "reference"


RUNGS: tuple[Rung, ...] = (
    Rung(
        "loops",
        "The reference: one token, one request, one block at a time; each weight is "
        "read once for every token.",
    ),
    Rung(
        "bookkeeping in arrays",
        "Tables of blocks and slots are arrays on the host, with counts kept where "
        "they change, so that no question scans the pool or waits for the device.",
        _optimized("kv_blocks.BlockPool", "state_slots.StateSlots"),
        before={
            "scalar reads": {
                "kv_blocks.BlockPool": f"{_LADDER}.scalar_reads:BlockPool",
                "state_slots.StateSlots": f"{_LADDER}.scalar_reads:StateSlots",
            }
        },
    ),
    Rung(
        "batched commit",
        "Prefixes are matched by bisection, and blocks and slots are published, and "
        "states copied, for all rows and layers at once: as few launches for many as "
        "for one.",
        _optimized(
            "scheduler.Scheduler", "prefix_cache.PrefixCache", "snapshots.copy_states"
        ),
        before={
            "copies in a loop": {
                "snapshots.copy_states": f"{_LADDER}.loop_copies:copy_states"
            }
        },
    ),
    Rung(
        "vectorized metadata",
        "Index arrays come from prefix sums and repeats, so that the host's work for a "
        "prompt does not grow with its tokens.",
        {"metadata.MetadataBuilder": f"{_LADDER}.single_transfers:MetadataBuilder"},
    ),
    Rung(
        "batched products",
        "All tokens of a step are multiplied by a matrix at once, which is then read "
        "once a step; norms and activations take all tokens too.",
        _optimized(
            "model.Model",
            "linear.linear",
            "norm.rms_norm",
            "norm.add_rms_norm",
            "norm.gated_group_rms_norm",
            "mlp.activate",
            "mlp.activate_gated",
        ),
    ),
    Rung(
        "paged attention",
        "Many queries attend at once to K/V blocks found through their tables, instead "
        "of one to a gathered copy.",
        _optimized(
            "attention.append_kv",
            "attention.append_rotary_kv",
            "attention.attend_decode",
            "attention.attend_prefill",
        ),
    ),
    Rung(
        "varlen convolution",
        "Rows of any length are convolved in one packed batch; windows before a row "
        "come from its state.",
        _optimized("conv1d.conv_prefill"),
    ),
    Rung(
        "chunked scan",
        "Within a chunk the recurrence is a matrix product, so that only chunks, and "
        "no longer tokens, wait for each other.",
        _optimized("scan.scan_prefill"),
    ),
    Rung(
        "batched state updates",
        "Conv windows and SSM states of all decode rows move on at once.",
        _optimized("conv1d.conv_decode", "scan.scan_decode"),
    ),
    Rung(
        "grouped experts",
        "Tokens are sorted by expert, so that each expert's matrices meet all of its "
        "tokens in one product.",
        _optimized("moe.route", "moe.apply_experts"),
    ),
    Rung(
        "sampling on the device",
        "All rows are filtered and drawn at once where the logits are, and nothing but "
        "tokens is read back.",
        _optimized("sampler.sample", "sampler.log_probabilities"),
    ),
    Rung(
        "one copy a step",
        "All index arrays go to the device in one copy, and all that is wanted of a "
        "step comes back in one.",
        _optimized("metadata.MetadataBuilder"),
        options={"graphs": "off", "kernels": "torch"},
        backend="optimized",
    ),
    Rung(
        "fused kernels",
        "What torch does in several passes over memory is one Triton kernel, in which "
        "all in between stays in registers; without Triton, nothing changes.",
        options={"kernels": "auto"},
        backend="optimized",
    ),
    Rung(
        "static buffers",
        "Steps are padded to a few shapes and find their inputs at fixed addresses, as "
        "graphs will need it; states are stored in place, in rows by padded prompts.",
        options={"graphs": "padded"},
        before={
            "staging copied in a loop": {
                "model.Model": f"{_LADDER}.staging:ModelWithLoop"
            },
            "staging by max_requests": {
                "model.Model": f"{_LADDER}.staging:ModelByRequests"
            },
            "staging by padded prompts": {
                "model.Model": f"{_LADDER}.staging:ModelByPrefills"
            },
        },
        backend="optimized",
    ),
    Rung(
        "decode graphs",
        "Steps that only decode are captured once and replayed, so that the host "
        "starts one graph instead of a thousand kernels.",
        options={"graphs": "decode"},
        backend="optimized",
    ),
    Rung(
        "full graphs",
        "Steps with prompts are replayed too, also those that store states or go on "
        "in the middle of a prompt.",
        options={"graphs": "all"},
        backend="optimized",
    ),
    Rung(
        "side stream",
        "Shared experts are computed beside the routed ones, which leave much of a GPU "
        "idle.",
        options={"side_stream": True},
        backend="optimized",
    ),
)


def find(name: str) -> Rung:
    """Return the rung of this name.

    Raises:
        KeyError: There is none; the message lists all.
    """
    for rung in RUNGS:
        if rung.name == name:
            return rung
    names = ", ".join(rung.name for rung in RUNGS)
    raise KeyError(f"no rung is called {name!r}; there are {names}")


def components(
    name: str, backend: str | None = None, before: str | None = None
) -> dict[str, str | object]:
    """Return the replacements that make an engine one of this rung.

    What is left out is the backend's own, so that a choice of kernels stays in force.

    Args:
        name: A rung.
        backend: Whose engine it will be; the rung's own unless given.
        before: One of the forms that the rung replaced, to be used in its place.
    """
    rung = find(name)
    chosen: dict[str, str | object] = dict.fromkeys(component_keys(), "reference")
    for earlier in RUNGS[: RUNGS.index(rung) + 1]:
        chosen |= earlier.components
    if before is not None:
        chosen |= rung.before[before]
    own = backend or rung.backend
    return {key: choice for key, choice in chosen.items() if choice != own}


def options(name: str) -> dict[str, Any]:
    """Return the options of `EngineConfig` that an engine of this rung needs."""
    settings: dict[str, Any] = {}
    for rung in RUNGS[: RUNGS.index(find(name)) + 1]:
        settings |= rung.options
    return settings
