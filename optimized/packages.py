"""Mamba layers by the kernels of the packages ``mamba_ssm`` and ``causal_conv1d``.

Decode steps are one call for all rows, and can be captured. Prefills are not: the
packages start a sequence from one state and give back its last one, and know nothing of
states in between. So each row is cut where a state is stored, and its pieces are
computed one after the other. The host reads where they end, once a call; step records
count only the reads of the engine's own.

The first prompt of an engine waits about a minute while ``mamba_ssm`` tries out its
tiles, if they were never tried before in this process. Tiles that are chosen by time
may differ from process to process, and so may last bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig, Sizes
from lockstep.errors import ConfigError
from lockstep.parameters import MambaParameters
from lockstep.shapes import (
    ConvBias,
    ConvInputs,
    ConvStates,
    ConvWeight,
    ScanInputs,
    SsmStates,
)

#: The convolution loads so many channels at a time, from places of so many bytes.
_CHANNELS, _BYTES = 8, 16
#: Taps of its filters.
_WIDTHS = (2, 3, 4)
#: Offsets have 32 bits, one of them a sign.
_MOST_OFFSETS = 2**31


def check(
    config: MambaConfig,
    sizes: Sizes,
    dtype: torch.dtype,
    window_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> None:
    """Refuse what the packages do not have, before they do something else.

    Args:
        config: The Mamba layers.
        sizes: Of the engine.
        dtype: Of weights and activations.
        window_dtype: Of conv windows.
        state_dtype: Of SSM states.

    Raises:
        ConfigError: A missing package, or a shape, dtype or size without a kernel.
    """
    _operators()
    dtypes = dtype, window_dtype, state_dtype
    for is_refused, reason in _list_refused(config, sizes, *dtypes):
        if is_refused:
            raise ConfigError(f'kernels="mamba-ssm" cannot be used: {reason}')


def _list_refused(
    config: MambaConfig,
    sizes: Sizes,
    dtype: torch.dtype,
    window_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> Iterator[tuple[bool, str]]:
    """List what is refused, whether it is so, and why."""
    channels, limit = config.conv_channels, config.time_step_limit
    yield (
        limit[0] > 0 or limit[1] < math.inf,
        f"time_step_limit is {limit}, and its decode steps clamp nothing",
    )
    yield (
        config.conv_width not in _WIDTHS,
        f"conv_width is {config.conv_width}; there are {_WIDTHS}",
    )
    yield (
        bool(channels % _CHANNELS),
        f"{channels} channels are convolved, not a multiple of {_CHANNELS}",
    )
    for name, each in (("dtype", dtype), ("ssm_state_dtype", state_dtype)):
        yield each == torch.float64, f"{name} is float64, and its arithmetic float32"
    yield (
        window_dtype != dtype,
        f"conv windows are {window_dtype}, and must be {dtype} as activations are; "
        "leave kv_dtype unset",
    )
    tokens, slots = sizes.max_tokens_per_step, sizes.num_slots
    # Of a token; of a chunk's states, and of its products of tokens, a token's share.
    chunk = sizes.scan_chunk_size
    widths = (
        config.inner_size + channels + config.num_heads,
        -(-config.inner_size * config.state_size // chunk),
        config.num_groups * chunk,
    )
    yield (
        tokens * max(widths) >= _MOST_OFFSETS,
        f"max_tokens_per_step is {tokens}, more than its offsets can count in scan "
        f"chunks of {chunk}",
    )
    yield (
        slots * channels * config.conv_window >= _MOST_OFFSETS,
        f"there are {slots} state slots, more than its offsets can count",
    )


def conv_decode(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve the tokens of all decode rows, and slide all windows on.

    Cost: two launches, one of them for slot ids of 32 bits. Padded rows work on the
    dummy slot, each as it finds it.
    """
    return _operators().conv_update(
        inputs,
        conv_states,
        weight,
        bias,
        activation="silu",
        conv_state_indices=batch.decode_slot_ids.int(),
    )


def conv_prefill(
    inputs: ConvInputs,
    weight: ConvWeight,
    bias: ConvBias | None,
    conv_states: ConvStates,
    batch: BatchMetadata,
) -> ConvInputs:
    """Convolve row after row, cut where windows are stored.

    Cost: a read by the host, and three launches a piece; the outputs are copied once,
    and the inputs too where the kernel could not load them. Outputs of padding tokens
    are not written.
    """
    outputs = inputs.new_empty(inputs.shape)
    if inputs.stride(0) % _CHANNELS or inputs.data_ptr() % _BYTES:
        # Not `contiguous`, for which one row with any stride is so already.
        inputs = inputs.clone(memory_format=torch.contiguous_format)

    def run(span: slice, window: Tensor) -> Tensor:
        y, window = _operators().conv(
            inputs[span].T[None],
            weight,
            bias,
            initial_states=window.mT.contiguous().mT,
            return_final_states=True,
            activation="silu",
        )
        outputs[span] = y[0].T
        return window

    _run_pieces(run, conv_states, batch)
    return outputs


def scan_decode(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Advance the states of all decode rows, each in its slot.

    Cost: one launch; each state is read and written once. Padded rows work on the dummy
    slot, each as it finds it.
    """
    x, dt, B, C = tokens
    # Views without strides: so the kernel knows that a head has one number of each.
    return _operators().state_update(
        ssm_states,
        x,
        dt[..., None].expand(x.shape),
        parameters.A[:, None, None].expand(ssm_states.shape[1:]),
        B,
        C,
        D=parameters.D[:, None].expand(x.shape[1:]),
        dt_bias=parameters.dt_bias[:, None].expand(x.shape[1:]),
        dt_softplus=True,
        state_batch_indices=batch.decode_slot_ids,
    )


def scan_prefill(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Scan row after row, cut where states are stored.

    A piece is scanned in chunks that begin where it does. Between pieces the state is
    rounded as the pool holds it, so that going on from a stored state changes nothing.

    Cost: a read by the host, and about nine launches a piece; the outputs are copied
    once. Outputs of padding tokens are not written.
    """
    outputs = tokens.x.new_empty(tokens.x.shape)

    def run(span: slice, state: Tensor) -> Tensor:
        x, dt, B, C = (part[span][None] for part in tokens)
        y, state = _operators().chunk_scan(
            x,
            dt,
            parameters.A,
            B,
            C,
            config.scan_chunk_size,
            D=parameters.D,
            dt_bias=parameters.dt_bias,
            initial_states=state,
            dt_softplus=True,
            dt_limit=config.time_step_limit,
            return_final_states=True,
        )
        outputs[span] = y[0]
        return state

    with _products_of_float32():
        _run_pieces(run, ssm_states, batch)
    return outputs


class _Stop(NamedTuple):
    """A prefill offset of a row at which its state is written to a slot."""

    row: int
    end: int
    slot: int


def _list_stops(batch: BatchMetadata) -> list[_Stop]:
    """Read all stops of the real rows, in order, at once."""
    parts = (
        *(batch.cu_prefill_lens[1:], batch.prefill_slot_ids),
        *(batch.snapshot_rows, batch.snapshot_ends, batch.snapshot_slot_ids),
    )
    numbers = torch.cat(parts).cpu().split([len(part) for part in parts])
    ends, slots, *stored = (part.tolist() for part in numbers)
    count, snapshots = batch.shape.prefill_requests, batch.num_snapshots
    last = zip(range(count), ends[:count], slots[:count], strict=True)
    before = zip(*(part[:snapshots] for part in stored), strict=True)
    return sorted(_Stop(*each) for each in (*last, *before))


def _run_pieces(
    run: Callable[[slice, Tensor], Tensor], states: Tensor, batch: BatchMetadata
) -> None:
    """Take each row from its initial state from stop to stop, and write the states.

    Args:
        run: Computes a range of prefill tokens from a state; returns that at its end.
        states: A layer's pool.
        batch: Names rows, slots and snapshots.
    """
    # Copies: a row may start from a slot that an earlier one writes.
    initial = states[batch.initial_slot_ids]
    begin, row, state = 0, -1, initial
    for stop in _list_stops(batch):
        if stop.row != row:
            row, state = stop.row, initial[stop.row : stop.row + 1]
        if stop.end > begin:
            state = run(slice(begin, stop.end), state).to(states.dtype)
        states[stop.slot] = state[0]
        begin = stop.end


class _Operators(NamedTuple):
    """What is called of the packages."""

    conv: Callable[..., Any]
    conv_update: Callable[..., Tensor]
    chunk_scan: Callable[..., Any]
    state_update: Callable[..., Tensor]


@cache
def _operators() -> _Operators:
    """Import them, once.

    Raises:
        ConfigError: A package is missing, or does not fit the others.
    """
    try:
        conv = import_module("causal_conv1d")
        scan, update = _import_below(
            "mamba_ssm", "ops.triton.ssd_combined", "ops.triton.selective_state_update"
        )
        return _Operators(
            conv.causal_conv1d_fn,
            conv.causal_conv1d_update,
            scan.mamba_chunk_scan_combined,
            update.selective_state_update,
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            'kernels="mamba-ssm" needs the packages mamba-ssm and causal-conv1d, built '
            "for this torch: `pip install mamba-ssm causal-conv1d "
            f'--no-build-isolation`, or use kernels="triton" ({error})'
        ) from error


def _import_below(package: str, *names: str) -> list[ModuleType]:
    """Import modules of a package without the package itself.

    Its ``__init__`` imports everything there is, and fails without the compiled kernels
    of Mamba-1, of which nothing is needed here. So an empty module stands for it
    meanwhile, and what is imported below is kept from others, who may want the whole.
    """

    def take_out() -> dict[str, Any]:
        found = [name for name in sys.modules if name.partition(".")[0] == package]
        return {name: sys.modules.pop(name) for name in found}

    others = take_out()
    try:
        if (spec := find_spec(package)) is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
        sys.modules[package] = empty = ModuleType(package)
        empty.__path__ = list(spec.submodule_search_locations or ())
        return [import_module(f"{package}.{name}") for name in names]
    finally:
        take_out()
        sys.modules.update(others)


@contextmanager
def _products_of_float32() -> Generator[None]:
    """Let kernels that are compiled within multiply float32 with nearly all its bits.

    They leave it to Triton, which would round operands to the eleven bits of TF32; in
    three products of such parts, hardly anything is lost.
    """
    knobs: Any = import_module("triton.knobs")
    with knobs.language.scope():
        knobs.language.fp32_default = "tf32x3"
        yield
