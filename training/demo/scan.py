"""The chunked Mamba-2 scan of transformers, written as matrix products.

The library's torch version multiplies and then sums broadcast tensors, which moves
gigabytes a layer. These are the same sums; `replace_scan` compares the two first.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h

_library_scan = modeling_nemotron_h.mamba2_chunk_scan


def replace_scan() -> None:
    """Make NemotronH models use `chunk_scan` for whole sequences."""
    shapes = {"dt": (2, 50, 4), "B": (2, 50, 2, 8), "C": (2, 50, 2, 8)}
    inputs: dict[str, Any] = {name: torch.randn(s) for name, s in shapes.items()}
    inputs |= {"A": -torch.rand(4) * 4, "D": torch.randn(4), "dt_bias": torch.randn(4)}
    inputs |= {"hidden_states": torch.randn(2, 50, 4, 8), "chunk_size": 16}
    inputs |= {"dt_softplus": True}
    torch.testing.assert_close(
        chunk_scan(**inputs), _library_scan(**inputs), rtol=1e-4, atol=1e-4
    )
    modeling_nemotron_h.mamba2_chunk_scan = chunk_scan


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **rest: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan a batch of sequences that begin with an empty state."""
    if return_final_states or initial_states is not None:
        return _library_scan(
            hidden_states,
            dt,
            A,
            B,
            C,
            chunk_size,
            D=D,
            dt_bias=dt_bias,
            dt_limit=dt_limit,
            initial_states=initial_states,
            return_final_states=return_final_states,
            **rest,
        )
    length, heads = hidden_states.shape[1:3]
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    x = _chunks(hidden_states.float(), chunk_size)
    step = _chunks(dt.float(), chunk_size)
    B, C = (_chunks(_per_head(m.float(), heads), chunk_size) for m in (B, C))
    log_decay = (step * A).cumsum(2).transpose(2, 3)
    inner = _within(x * step[..., None], B, C, log_decay)
    outer = _between(x * step[..., None], B, C, log_decay)
    y = (inner + outer + D[:, None] * x).flatten(1, 2)
    return y[:, :length]


def _chunks(values: Tensor, size: int) -> Tensor:
    """Cut [batch, time, ...] into [batch, chunk, place, ...], padded with zeros."""
    missing = -values.shape[1] % size
    padded = F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing))
    return padded.unflatten(1, (-1, size))


def _per_head(values: Tensor, heads: int) -> Tensor:
    """Repeat each group's values for the heads of the group."""
    return values.repeat_interleave(heads // values.shape[2], dim=2)


def _within(x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor) -> Tensor:
    """Return what the places of a chunk give to later places of the same chunk."""
    size = x.shape[2]
    causal = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    gaps = log_decay[..., :, None] - log_decay[..., None, :]
    decay = gaps.masked_fill(~causal, -torch.inf).exp()
    weights = torch.einsum("bcqhn,bcshn->bchqs", C, B) * decay
    return torch.einsum("bchqs,bcshp->bcqhp", weights, x)


def _between(x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor) -> Tensor:
    """Return what earlier chunks give to the places of later chunks."""
    total = log_decay[..., -1]
    to_end = (total[..., None] - log_decay).exp().transpose(2, 3)
    states = torch.einsum("bcshn,bcshp->bchpn", B, x * to_end[..., None])
    after = total.cumsum(1)
    count = x.shape[1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
    gaps = (after - total)[:, :, None] - after[:, None]
    decay = gaps.masked_fill(~earlier[..., None], -torch.inf).exp()
    before = torch.einsum("bczh,bzhpn->bchpn", decay, states)
    from_start = log_decay.exp().transpose(2, 3)[..., None]
    return torch.einsum("bcqhn,bchpn->bcqhp", C, before) * from_start
