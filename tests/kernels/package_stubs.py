"""The packages of ``kernels="mamba-ssm"`` where there is no GPU.

The Triton kernels of ``mamba_ssm`` are interpreted. ``causal_conv1d`` is compiled for
GPUs alone: a stand-in takes its place, which asks of its arguments what that does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lockstep.optimized import packages

#: What the compiled convolution loads at once: channels, and bytes.
CHANNELS, BYTES = 8, 16


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Take one token into each of some windows (slots, channels, width - 1)."""
    assert cache_seqlens is None and activation == "silu"
    assert conv_state_indices is not None and conv_state_indices.dtype == torch.int32
    assert conv_state.dtype == x.dtype
    outputs = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        taps = torch.cat((conv_state[slot], x[row, :, None]), dim=1)
        outputs[row] = _convolve(taps[None], weight, bias)[0, :, 0].to(x.dtype)
        conv_state[slot] = taps[:, 1:]
    return outputs


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve (batch, channels, tokens), channels side by side, behind windows."""
    assert seq_idx is None and final_states_out is None and activation == "silu"
    assert return_final_states and initial_states is not None
    assert x.stride(1) == 1 and x.stride(2) > 1 and not x.shape[1] % CHANNELS
    assert not x.stride(2) % CHANNELS and not x.stride(0) % CHANNELS
    assert not x.data_ptr() % BYTES
    assert initial_states.stride(1) == 1 and initial_states.dtype == x.dtype
    assert initial_states.shape == (*x.shape[:2], weight.shape[1] - 1)
    taps = torch.cat((initial_states, x), dim=2)
    outputs = _convolve(taps, weight, bias).to(x.dtype)
    final = taps[:, :, x.shape[2] :].mT.contiguous().mT
    return outputs, final


def _convolve(taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve in float32, and apply SiLU."""
    wide = None if bias is None else bias.float()
    summed = functional.conv1d(
        taps.float(), weight.float()[:, None], wide, groups=len(weight)
    )
    return functional.silu(summed)


@contextlib.contextmanager
def stand_in() -> Generator[None]:
    """Run the kernel set on a CPU.

    The deterministic mode of ``mamba_ssm`` settles tiles without timing them, which
    needs a GPU, and so does the choice of a device around its kernels.
    """
    module = ModuleType("causal_conv1d")
    vars(module).update(
        causal_conv1d_fn=causal_conv1d_fn, causal_conv1d_update=causal_conv1d_update
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMBA_DETERMINISTIC", "1")
        patch.setitem(sys.modules, "causal_conv1d", module)
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        packages._operators.cache_clear()
        try:
            yield
        finally:
            packages._operators.cache_clear()
