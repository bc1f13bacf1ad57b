"""Verify a component of your own against the reference, in ten lines.

    python -m examples.verify_component

The scan of decoding rows is written anew without a loop. Then a fault is put in: the
state decays after it has taken the token in, not before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig
from lockstep.parameters import MambaParameters
from lockstep.verify import verify


def scan_decode(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: Tensor,
    batch: BatchMetadata,
    decays_late: bool = False,
) -> Tensor:
    """Advance the state of all decode rows at once."""
    heads_per_group = config.num_heads // config.num_groups
    B, C = (p.repeat_interleave(heads_per_group, 1) for p in (tokens.B, tokens.C))
    dt = functional.softplus(tokens.dt + parameters.dt_bias)
    dt = dt.clamp(*config.time_step_limit)
    decay = torch.exp(dt * parameters.A)[:, :, None, None]
    taken_in = (dt[:, :, None] * tokens.x)[..., None] * B[:, :, None]
    states = ssm_states[batch.decode_slot_ids].to(decay.dtype)
    states = decay * (states + taken_in) if decays_late else decay * states + taken_in
    ssm_states[batch.decode_slot_ids] = states.to(ssm_states.dtype)
    y = (states * C[:, :, None]).sum(-1) + parameters.D[:, None] * tokens.x
    return y.to(tokens.x.dtype)


def faulty_scan_decode(*arguments: object) -> Tensor:
    """Decay what has only just come in."""
    return scan_decode(*arguments, decays_late=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    for mine in (scan_decode, faulty_scan_decode):
        print(verify("reference", {"scan.scan_decode": mine}), end="\n\n")
