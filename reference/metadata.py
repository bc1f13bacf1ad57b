"""From a plan to the index arrays of `lockstep.batch.BatchMetadata`, loop by loop.

Rows come in the plan's order, decode rows first. Nothing is padded on this side: every
padded count equals the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata, Draws
from lockstep.config import Sizes
from lockstep.plan import RowPlan, StepPlan
from lockstep.request import Request


class MetadataBuilder:
    """Makes the index arrays of each step."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """Remember sizes and device.

        Args:
            sizes: The engine's sizes.
            device: Where the arrays go.
        """
        self.sizes = sizes
        self.device = device

    def build(
        self, plan: StepPlan, requests: Mapping[str, Request], all_logits: bool
    ) -> BatchMetadata:
        """Make the arrays of one step.

        Args:
            plan: The step's rows.
            requests: The request of every row.
            all_logits: Whether logits are wanted after every token, not only where one
                is to be drawn or a prompt's token to be reported.
        """
        rows = plan.decode_rows + plan.prefill_rows
        wanted = _wanted_logits(rows, requests, all_logits)
        drawing = [row for row in rows if row.samples]
        return BatchMetadata(
            shape=plan.shape,
            padded_shape=plan.shape,
            num_snapshots=sum(len(row.snapshots) for row in plan.prefill_rows),
            num_logits=len(wanted),
            num_samples=len(drawing),
            block_tables=self._tables(rows),
            context_lens=self._ints([row.end for row in rows]),
            **self._token_arrays(rows, requests),
            **self._decode_arrays(plan.decode_rows),
            **self._prefill_arrays(plan.prefill_rows),
            **self._snapshot_arrays(plan.prefill_rows),
            logit_index=self._ints(wanted),
            sample_index=self._ints(
                [wanted.index(token) for token in _last_tokens(rows)]
            ),
            draws=self._draws(drawing, [requests[row.request_id] for row in drawing]),
        )

    def _token_arrays(
        self, rows: list[RowPlan], requests: Mapping[str, Request]
    ) -> dict[str, Tensor]:
        """Describe each token: what it is, where it stands, where its K/V goes."""
        tokens = [(row, p) for row in rows for p in range(row.start, row.end)]
        ids = [requests[row.request_id].token_ids[p] for row, p in tokens]
        kv_index = [_kv_index_of(row, p, self.sizes) for row, p in tokens]
        return {
            "token_ids": self._ints(ids),
            "positions": self._ints([p for _, p in tokens]),
            "token_mask": torch.ones(len(tokens), dtype=torch.bool, device=self.device),
            "kv_index": self._ints(kv_index),
        }

    def _decode_arrays(self, rows: list[RowPlan]) -> dict[str, Tensor]:
        """Describe each decode row: its live slot, and where a copy of it goes."""
        targets = [
            row.snapshots[0].slot_id if row.snapshots else self.sizes.dummy_slot
            for row in rows
        ]
        return {
            "decode_slot_ids": self._ints([row.slot_id for row in rows]),
            "decode_snapshot_slot_ids": self._ints(targets),
        }

    def _prefill_arrays(self, rows: list[RowPlan]) -> dict[str, Tensor]:
        """Describe each prefill row: its slice, its slots, its scan chunks."""
        chunks = _cut_scan_chunks(rows, self.sizes.scan_chunk_size)
        return {
            "cu_prefill_lens": self._ints(_offsets(rows)),
            "prefill_starts": self._ints([row.start for row in rows]),
            "prefill_slot_ids": self._ints([row.slot_id for row in rows]),
            "initial_slot_ids": self._ints([row.initial_slot_id for row in rows]),
            "cu_scan_chunks": self._ints(chunks.boundaries),
            "scan_chunk_rows": self._ints(chunks.rows),
            "last_scan_chunks": self._ints(chunks.last),
        }

    def _snapshot_arrays(self, rows: list[RowPlan]) -> dict[str, Tensor]:
        """Describe each state to be stored: whose, after which token, and where."""
        found = [
            (index, offset + snapshot.position - row.start, snapshot.slot_id)
            for index, row in enumerate(rows)
            for offset in [_offsets(rows)[index]]
            for snapshot in row.snapshots
        ]
        chunks = _find_snapshot_chunks(rows, self.sizes.scan_chunk_size)
        return {
            "snapshot_rows": self._ints([row for row, _, _ in found]),
            "snapshot_ends": self._ints([end for _, end, _ in found]),
            "snapshot_slot_ids": self._ints([slot for _, _, slot in found]),
            "snapshot_scan_chunks": self._ints(chunks),
        }

    def _draws(self, rows: list[RowPlan], requests: list[Request]) -> Draws:
        """Describe each draw: what its request asks for, and what may not come yet."""
        sampling = [request.sampling for request in requests]
        banned = [list(request.banned_token_ids) for request in requests]
        width = max((len(ids) for ids in banned), default=0)
        filled = [(ids + [-1] * width)[:width] for ids in banned]
        return Draws(
            temperatures=self._reals([s.temperature for s in sampling], torch.float32),
            top_ks=self._ints([s.top_k or 0 for s in sampling]),
            top_ps=self._reals([s.top_p for s in sampling], torch.float64),
            min_ps=self._reals([s.min_p for s in sampling], torch.float64),
            seeds=self._ints([s.seed or 0 for s in sampling]),
            positions=self._ints([row.end for row in rows]),
            banned_ids=self._ints([token for ids in filled for token in ids]).view(
                len(rows), width
            ),
        )

    def _ints(self, values: list[int]) -> Tensor:
        """Put integers onto the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _reals(self, values: list[int | float], dtype: torch.dtype) -> Tensor:
        """Put real numbers onto the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _tables(self, rows: list[RowPlan]) -> Tensor:
        """Lay block tables side by side, dummy block after the last of each."""
        width = max(len(row.block_table) for row in rows)
        dummy = [self.sizes.dummy_block] * width
        tables = [(row.block_table + dummy)[:width] for row in rows]
        return self._ints([block for table in tables for block in table]).view(
            len(rows), width
        )


def _wanted_logits(
    rows: list[RowPlan], requests: Mapping[str, Request], all_logits: bool
) -> list[int]:
    """List the tokens of a batch after which logits are wanted, in their order."""
    wanted: list[int] = []
    for row, first in zip(rows, _offsets(rows)[:-1], strict=True):
        positions: Sequence[int] = range(row.start, row.end)
        if not all_logits:
            request = requests[row.request_id]
            positions = request.logit_positions(row.start, row.end, row.samples)
        wanted += [first + position - row.start for position in positions]
    return wanted


def _last_tokens(rows: list[RowPlan]) -> list[int]:
    """List the tokens of a batch after which one is drawn."""
    ends = _offsets(rows)[1:]
    return [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]


class _ScanChunks(NamedTuple):
    """Where the scan chunks of packed prefill rows lie.

    Attributes:
        boundaries: Prefill offsets at which chunks begin, and the end.
        rows: Row of each chunk.
        last: Last chunk of each row.
    """

    boundaries: list[int]
    rows: list[int]
    last: list[int]


def _cut_scan_chunks(rows: list[RowPlan], scan_chunk_size: int) -> _ScanChunks:
    """Cut packed prefill rows into scan chunks.

    Chunks are cut at absolute multiples of the chunk size, whatever position a slice
    starts at, so that every block boundary ends a chunk, in any slicing of a prompt. A
    chunk never reaches into the next row.

    Args:
        rows: Prefill rows, in batch order.
        scan_chunk_size: Most tokens in a chunk.
    """
    boundaries, chunk_rows, last = [0], list[int](), list[int]()
    offset = 0
    for index, row in enumerate(rows):
        position = row.start
        while position < row.end:
            next_multiple = (position // scan_chunk_size + 1) * scan_chunk_size
            chunk_end = min(next_multiple, row.end)
            offset += chunk_end - position
            position = chunk_end
            boundaries.append(offset)
            chunk_rows.append(index)
        last.append(len(chunk_rows) - 1)
    return _ScanChunks(boundaries, chunk_rows, last)


def _find_snapshot_chunks(rows: list[RowPlan], scan_chunk_size: int) -> list[int]:
    """Find the scan chunk at whose end each snapshot of these rows is known.

    Args:
        rows: Prefill rows, in batch order; snapshots by ascending position.
        scan_chunk_size: Most tokens in a chunk.
    """
    chunks = _cut_scan_chunks(rows, scan_chunk_size)
    found: list[int] = []
    offset = 0
    for row in rows:
        for snapshot in row.snapshots:
            end = offset + snapshot.position - row.start
            found.append(chunks.boundaries.index(end) - 1)
        offset += row.num_tokens
    return found


def _kv_index_of(row: RowPlan, position: int, sizes: Sizes) -> int:
    """Say where the K/V of one token goes.

    A token of a shared block is computed again when its state was not stored; its K/V
    goes to the dummy block, since others read the shared one.

    Args:
        row: The token's row.
        position: Its absolute position.
        sizes: The engine's sizes.
    """
    block, offset = divmod(position, sizes.block_size)
    is_shared = block < row.num_shared_blocks
    block_id = sizes.dummy_block if is_shared else row.block_table[block]
    return block_id * sizes.block_size + offset


def _offsets(rows: list[RowPlan]) -> list[int]:
    """Return the offsets at which packed rows begin, and the end."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + row.num_tokens)
    return offsets
