"""The selective state-space recurrence of Mamba-2, token by token.

========  =================================================  =======================
letter    meaning                                            shape of one token
========  =================================================  =======================
``x``     inputs after the convolution                       (heads, dim)
``dt``    time step: how much of the input a head takes in   (heads,)
``A``     decay rate, negative; a parameter                  (heads,)
``B``     how an input enters the state                      (groups, state)
``C``     how the state is read                              (groups, state)
``D``     skip from x to y; a parameter                      (heads,)
``y``     outputs                                            (heads, dim)
========  =================================================  =======================

With the state ``h`` of a head, (dim, state):

    dt = clamp(softplus(dt + dt_bias))
    h  = exp(dt * A) * h + (dt * x) outer B
    y  = h . C + D * x

The arithmetic is float32 (float64 in a float64 model). Between tokens the state is
rounded to the dtype of the state pool, *after each token* and not only where it is
stored: so a run that was cut anywhere and resumed equals one that was not, bit for bit.

Source: Dao & Gu 2024, "Transformers are SSDs", arXiv 2405.21060, eq. 1 and 2, with the
discretization of Gu & Dao 2023, "Mamba", arXiv 2312.00752, eq. 4 (B by Euler's rule).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig
from lockstep.parameters import MambaParameters
from lockstep.shapes import ScanInputs, SsmStates

from .rows import prefill_rows


def scan_decode(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Advance the state of each decode row by one token.

    Args:
        tokens: The decode tokens.
        parameters: The layer's; A, dt_bias and D are used.
        config: Heads, groups and the range of time steps.
        ssm_states: One layer's states; the rows' live slots are read and written.
        batch: Names the slots.

    Returns:
        y of each token, in the dtype of x.
    """
    outputs = torch.empty_like(tokens.x)
    for index, slot in enumerate(batch.decode_slot_ids.tolist()):
        state = ssm_states[slot]
        state, outputs[index] = _advance(state, tokens, index, parameters, config)
        ssm_states[slot] = state
    return outputs


def scan_prefill(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Run the recurrence over each prefill row, store states, and write the last one.

    A row starts from the state of its initial slot, which stays as it is unless it is
    the row's live slot too. Scan chunks mean nothing to a loop over tokens.

    Args:
        tokens: The prefill tokens.
        parameters: The layer's; A, dt_bias and D are used.
        config: Heads, groups and the range of time steps.
        ssm_states: One layer's states; live and snapshot slots are written.
        batch: Names rows, slots and snapshots.

    Returns:
        y of each token, in the dtype of x.
    """
    outputs = torch.empty_like(tokens.x)
    for row in prefill_rows(batch):
        state = ssm_states[row.initial_slot]
        for index in range(row.start, row.end):
            state, outputs[index] = _advance(state, tokens, index, parameters, config)
            for end, slot in row.snapshots:
                if end == index + 1:
                    ssm_states[slot] = state
        ssm_states[row.live_slot] = state
    return outputs


def _advance(
    state: Tensor,
    tokens: ScanTokens,
    index: int,
    parameters: MambaParameters,
    config: MambaConfig,
) -> tuple[Tensor, Tensor]:
    """Return the state after one token, rounded as it is carried, and the token's y."""
    wide = torch.promote_types(tokens.x.dtype, torch.float32)
    x, dt, *projections = (part[index].to(wide, copy=True) for part in tokens)
    B, C = (_spread(part, config) for part in projections)  # (heads, 1, state)
    dt = functional.softplus(dt + parameters.dt_bias).clamp(*config.time_step_limit)
    decay = torch.exp(dt * parameters.A)[:, None, None]
    taken_in = (dt[:, None] * x)[:, :, None] * B  # (heads, dim, state)
    new_state = decay * state.to(wide) + taken_in
    y = (new_state * C).sum(-1) + parameters.D[:, None] * x  # (heads, dim)
    return new_state.to(state.dtype), y


def _spread(projection: Tensor, config: MambaConfig) -> Tensor:
    """Give each head h the row of its group, h // (heads / groups)."""
    heads_per_group = config.num_heads // config.num_groups
    return projection[:, None].expand(-1, heads_per_group, -1).flatten(0, 1)[:, None]
