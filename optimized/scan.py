"""The selective scan in chunks: matrix products within, states passed between.

Unrolled over a chunk, the recurrence is a product with a lower triangular matrix:

    y[i]  = decay(start, i) * h_start . C[i] + D * x[i]
            + sum over j <= i of decay(j, i) * (B[j] . C[i]) * dt[j] * x[j]
    h_end = decay(start, end) * h_start
            + sum over j of decay(j, end) * dt[j] * x[j] outer B[j]

where ``decay(j, i) = exp(sum of dt * A over tokens j + 1 .. i)``. All chunks of the
batch are computed at once; only ``h_end`` goes from chunk to chunk, in the dtype of the
pool, so that a slice resumed at a chunk's end goes on with the very same state.

Chunks of any length stand in a frame of ``scan_chunk_size`` lanes. Empty lanes have a
zero time step: they take nothing in and let nothing decay.

Source: Dao & Gu 2024, "Transformers are SSDs", arXiv 2405.21060, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import MambaConfig
from lockstep.parameters import MambaParameters
from lockstep.shapes import ScanInputs, SsmStates


def scan_decode(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Advance the states of all decode rows at once.

    Cost: each state is gathered, computed and scattered; three copies of them are
    alive.
    """
    x, dt, B, C = _widen(tokens, parameters, config)
    states = ssm_states[batch.decode_slot_ids].to(x.dtype)
    decay = torch.exp(dt * parameters.A)[..., None, None]
    taken_in = (dt[..., None] * x)[..., None] * _per_head(B, config)[:, :, None]
    states = torch.addcmul(taken_in, decay, states)  # (tokens, heads, dim, state)
    ssm_states[batch.decode_slot_ids] = states.to(ssm_states.dtype)
    read = (states @ _per_head(C, config)[..., None]).squeeze(-1)
    return (read + parameters.D[:, None] * x).to(tokens.x.dtype)


def scan_prefill(
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
    batch: BatchMetadata,
) -> ScanInputs:
    """Run the recurrence over all chunks at once, then pass states through them.

    Cost: for each chunk and head about ``2 * size * (size * dim + 2 * dim * state)``
    operations and ``size ** 2`` decays in memory, with ``size`` that of a scan chunk,
    however few tokens it holds; for the states a few launches a chunk. Nothing is read
    back from the device.
    """
    frame = _Frame(batch, config.scan_chunk_size, len(tokens.x))
    return _scan(frame, tokens, parameters, config, ssm_states)


def _scan(
    frame: _Frame,
    tokens: ScanTokens,
    parameters: MambaParameters,
    config: MambaConfig,
    ssm_states: SsmStates,
) -> ScanInputs:
    """Scan the chunks of a frame, which lays tokens out and stores states."""
    x, dt, B, C = (frame.split(part) for part in _widen(tokens, parameters, config))
    steps = dt * parameters.A[:, None]  # (chunks, heads, lanes)
    taken_in = dt[..., None] * x  # (chunks, heads, lanes, dim)
    decays = _decays(steps)  # (chunks, heads, to lane, from lane)
    weights = (C @ B.mT)[:, :, None] * decays.unflatten(1, (config.num_groups, -1))
    B, C = _per_head(B, config), _per_head(C, config)  # (chunks, heads, lanes, state)
    arising = (taken_in * decays[:, :, -1, :, None]).mT @ B
    from_start = torch.exp(steps.cumsum(2))[..., None]
    starts, ends = frame.pass_states(arising, from_start[:, :, -1:], ssm_states)
    y = weights.flatten(1, 2) @ taken_in + from_start * (C @ starts.mT)
    frame.store(ends, ssm_states)
    return frame.join(y + parameters.D[:, None, None] * x).to(tokens.x.dtype)


class _Frame:
    """Scan chunks side by side, each in as many lanes as a whole one has."""

    def __init__(self, batch: BatchMetadata, size: int, num_tokens: int) -> None:
        self.batch = batch
        device = batch.cu_scan_chunks.device
        begins, ends = batch.cu_scan_chunks[:-1], batch.cu_scan_chunks[1:]
        lanes = begins[:, None] + torch.arange(size, device=device)
        # Empty lanes read the zeros that `split` puts behind the tokens.
        self.sources = lanes.where(lanes < ends[:, None], num_tokens)
        tokens = torch.arange(num_tokens, device=device)
        chunks = torch.searchsorted(ends, tokens, right=True)
        chunks = chunks.clamp(max=len(ends) - 1)
        self.places = (chunks * size + tokens - begins[chunks]).clamp(
            max=len(ends) * size - 1
        )
        self.is_padding = tokens >= batch.cu_scan_chunks[-1]

    def split(self, part: Tensor) -> Tensor:
        """Lay tokens out in lanes: (tokens, heads, ...) to (chunks, heads, lanes, ...).

        Nothing of other rows or of padding stands in empty lanes, so nothing needs to
        be multiplied away: not even NaN gets into a sum.
        """
        padded = torch.cat((part, part.new_zeros(1, *part.shape[1:])))
        return padded[self.sources].transpose(1, 2)

    def join(self, y: Tensor) -> Tensor:
        """Pack the lanes again; padding tokens get zeros."""
        packed = y.transpose(1, 2).flatten(0, 1)[self.places]
        return packed.masked_fill(self.is_padding[:, None, None], 0)

    def pass_states(
        self, arising: Tensor, decay: Tensor, ssm_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states before and after each chunk.

        A row's first chunk starts from the row's initial slot. It selects that, and
        does not weigh it, so that the row before could hand on NaN and do no harm.
        """
        rows = self.batch.scan_chunk_rows
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        initial = ssm_states[self.batch.initial_slot_ids]
        starts, ends = torch.empty_like(arising), torch.empty_like(arising)
        carry = ssm_states.new_zeros(arising.shape[1:])
        for chunk in range(len(arising)):
            start = torch.where(
                is_first[chunk],
                initial.index_select(0, rows[chunk : chunk + 1])[0],
                carry,
            )
            starts[chunk] = start
            end = torch.addcmul(arising[chunk], decay[chunk], starts[chunk])
            ends[chunk] = carry = end.to(ssm_states.dtype)
        return starts, ends

    def store(self, ends: Tensor, ssm_states: Tensor) -> None:
        """Write final states to live slots, and snapshots straight to theirs."""
        for slots, chunks in (
            (self.batch.prefill_slot_ids, self.batch.last_scan_chunks),
            (self.batch.snapshot_slot_ids, self.batch.snapshot_scan_chunks),
        ):
            ssm_states[slots] = ends[chunks].to(ssm_states.dtype)


def _widen(
    tokens: ScanTokens, parameters: MambaParameters, config: MambaConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, the settled time steps, B and C in the dtype of the arithmetic."""
    wide = torch.promote_types(tokens.x.dtype, torch.float32)
    x, dt, B, C = (part.to(wide) for part in tokens)
    dt = functional.softplus(dt + parameters.dt_bias).clamp(*config.time_step_limit)
    return x, dt, B, C


def _per_head(projections: Tensor, config: MambaConfig) -> Tensor:
    """Give each head its group's: (many, groups, ...) to (many, heads, ...)."""
    heads_per_group = config.num_heads // config.num_groups
    # Not by `repeat_interleave`, which may ask the device for the length.
    spread = projections.unsqueeze(2).expand(
        -1, -1, heads_per_group, *projections.shape[2:]
    )
    return spread.flatten(1, 2)


def _decays(steps: Tensor) -> Tensor:
    """Return the decay from the end of each lane to the end of each later one.

    Sums are taken anew for each pair: differences of one long sum would cancel, and
    lose digits that grow with the chunk.
    """
    lanes = steps.shape[-1]
    pairs = steps[..., None].expand(*steps.shape, lanes).tril(-1)
    return torch.exp(pairs.cumsum(-2)).tril()
