"""The index arrays of a step by prefix sums and repeats, sent as one copy.

Python looks at rows, to collect their numbers; tokens, blocks and scan chunks are laid
out by numpy in one buffer, which goes to the device whole. `_Extents` alone decides how
long the arrays are: what is longer than its content ends in entries that harm nobody.

Scan chunks are cut here too and not on the device: their arrays ride in a copy that is
made anyway, for less than it would cost to launch what cuts them there.

Where the engine has shapes for graphs, a step takes the smallest in which it fits, and
all other extents follow from that shape and from the engine's sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import le
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.batch import BatchMetadata, Draws
from lockstep.blocks import num_blocks_for
from lockstep.config import Sizes
from lockstep.plan import BatchShape, RowPlan, StepPlan
from lockstep.policy import host_shape
from lockstep.request import Request

from .buffers import StepBuffer, count_bytes, send_once

_Ints = NDArray[np.int64]
_Array = NDArray[Any]

#: Banned tokens of a row for which padded steps have room.
_BANNED_WIDTH = 8


class MetadataBuilder:
    """Makes the index arrays of each step, with one copy to the device."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """Make room for the largest padded step, if steps are padded."""
        self.sizes = sizes
        self.device = device
        self._fixed = {
            _host_extents(shape, sizes, all_logits)
            for shape in sizes.graph_shapes
            for all_logits in (False, True)
        }
        most = max((self._count_bytes(extents) for extents in self._fixed), default=0)
        self._buffer = StepBuffer(most, device)

    def build(
        self, plan: StepPlan, requests: Mapping[str, Request], all_logits: bool
    ) -> BatchMetadata:
        """Make the arrays of one step.

        Cost: one copy to the device, of at most eight bytes an entry; on the host a few
        passes over rows, and one over token ids and block tables to unpack the lists.
        """
        return self._send(*self._arrange(plan, requests, all_logits))

    def _pad(self, shape: BatchShape, all_logits: bool) -> BatchMetadata:
        """Make a step of padding alone, whose arrays are those of all of its shape."""
        room = _host_extents(shape, self.sizes, all_logits)
        return self._send(*self._arrange(StepPlan(), {}, all_logits, room))

    def _arrange(
        self,
        plan: StepPlan,
        requests: Mapping[str, Request],
        all_logits: bool,
        room: _Extents | None = None,
    ) -> tuple[_Extents, _Extents, dict[str, _Array]]:
        """Lay a step out; returns its real and its padded extents, and its arrays.

        Args:
            plan: The step.
            requests: Its requests by name.
            all_logits: Whether every token's logits are wanted.
            room: Padded extents, if the step itself does not settle them.
        """
        decodes, prefills = plan.decode_rows, plan.prefill_rows
        rows = decodes + prefills
        columns, chunks, snapshots = (
            _Columns.of(rows),
            _cut(_Columns.of(prefills), self.sizes.scan_chunk_size),
            _Snapshots.of(prefills),
        )
        drawing = np.flatnonzero(columns.samples)
        drawn_for = [requests[row.request_id] for row in rows if row.samples]
        wanted = _wanted_logits(columns, rows, requests, all_logits)
        real = _measure(columns, chunks, snapshots, wanted, drawn_for)
        padded = room or self._padded(real, all_logits)
        layout = _Layout(real, padded, self.sizes)
        tables = self._tables(rows, columns, real.table_blocks)
        arrays: dict[str, _Array] = {
            **layout.tokens(columns, tables, _token_ids(rows, requests, real.tokens)),
            **layout.requests(columns, tables),
            **layout.decodes(columns, decodes),
            **layout.prefills(columns),
            **layout.snapshots(columns, chunks, snapshots),
            **layout.scan_chunks(chunks),
            **layout.logits(columns, drawing, wanted),
            **layout.draws(columns.ends[drawing], drawn_for),
        }
        return real, padded, arrays

    def _padded(self, real: _Extents, all_logits: bool) -> _Extents:
        """Decide the sizes of the arrays: those of a graph's shape, or the real ones.

        The shape alone says how much else there is room for. What few steps want more
        of, logits of prompts and banned tokens, keeps its real size.
        """
        shape = host_shape(real.shape, self.sizes.graph_shapes)
        if shape is None:
            return real
        host = _host_extents(shape, self.sizes, all_logits)
        fits = all(map(le, real, host))
        return host if fits else real

    def _send(
        self, real: _Extents, padded: _Extents, arrays: Mapping[str, _Array]
    ) -> BatchMetadata:
        """Send arrays of a graph's shape to their fixed places, others anywhere."""
        if padded in self._fixed:
            sent = self._buffer.send(padded, arrays)
        else:
            sent = send_once(arrays, self.device)
        return BatchMetadata(
            shape=real.shape,
            padded_shape=padded.shape,
            num_snapshots=real.snapshots,
            num_logits=real.logits,
            num_samples=real.draws,
            **_with_draws(sent),
        )

    def _count_bytes(self, extents: _Extents) -> int:
        """Count the bytes of the arrays of a step that is padding alone."""
        return count_bytes(self._arrange(StepPlan(), {}, False, extents)[2])

    def _tables(self, rows: list[RowPlan], columns: _Columns, width: int) -> _Ints:
        """Put block tables under each other, dummy block after their last."""
        blocks = chain.from_iterable(row.block_table for row in rows)
        tables = np.full((len(rows), width), self.sizes.dummy_block, np.int64)
        is_filled = np.arange(width) < columns.table_lens[:, None]
        tables[is_filled] = np.fromiter(blocks, np.int64, columns.table_lens.sum())
        return tables


class _Columns(NamedTuple):
    """Numbers of some rows, an array for each kind."""

    starts: _Ints
    ends: _Ints
    slots: _Ints
    initial_slots: _Ints
    num_shared: _Ints
    table_lens: _Ints
    samples: _Ints

    @classmethod
    def of(cls, rows: list[RowPlan]) -> _Columns:
        """Collect the numbers, row by row."""
        table = [
            (
                row.start,
                row.end,
                row.slot_id,
                row.initial_slot_id,
                row.num_shared_blocks,
                len(row.block_table),
                row.samples,
            )
            for row in rows
        ]
        return cls(*np.array(table, np.int64).reshape(-1, len(cls._fields)).T)

    @property
    def lens(self) -> _Ints:
        """Tokens of each row."""
        return self.ends - self.starts


class _Snapshots(NamedTuple):
    """States that prefill rows store: whose, after which position, and where."""

    rows: _Ints
    positions: _Ints
    slots: _Ints

    @classmethod
    def of(cls, rows: list[RowPlan]) -> _Snapshots:
        """Collect the numbers, row by row."""
        table = [
            (index, snapshot.position, snapshot.slot_id)
            for index, row in enumerate(rows)
            for snapshot in row.snapshots
        ]
        return cls(*np.array(table, np.int64).reshape(-1, len(cls._fields)).T)


class _Chunks(NamedTuple):
    """Scan chunks of packed prefill rows.

    Attributes:
        lens: Tokens of each chunk.
        rows: Row of each chunk.
        last: Last chunk of each row.
        origin: Number that the chunk from position 0 on would have, for each row.
    """

    lens: _Ints
    rows: _Ints
    last: _Ints
    origin: _Ints

    def ending_at(self, snapshots: _Snapshots, scan_chunk_size: int) -> _Ints:
        """Find the chunk that ends where each snapshot is taken."""
        number = _ceil_divide(snapshots.positions, scan_chunk_size) - 1
        return self.origin[snapshots.rows] + number


def _cut(columns: _Columns, scan_chunk_size: int) -> _Chunks:
    """Number the chunks of each row from its origin; each is then known by a product.

    Chunk ``k`` from the origin covers ``[k * size, (k + 1) * size)``, cut to the row.
    """
    first = columns.starts // scan_chunk_size
    counts = _ceil_divide(columns.ends, scan_chunk_size) - first
    behind = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    origin = behind - counts - first
    begin = (np.arange(len(rows)) - origin[rows]) * scan_chunk_size
    begins = np.maximum(begin, columns.starts[rows])
    ends = np.minimum(begin + scan_chunk_size, columns.ends[rows])
    return _Chunks(ends - begins, rows, behind - 1, origin)


class _Extents(NamedTuple):
    """How many entries of each kind there are."""

    tokens: int
    prefills: int
    decodes: int
    snapshots: int
    scan_chunks: int
    table_blocks: int
    logits: int
    draws: int
    banned: int

    @property
    def shape(self) -> BatchShape:
        """The three that a batch is known by."""
        return BatchShape(self.tokens, self.prefills, self.decodes)


def _host_extents(shape: BatchShape, sizes: Sizes, all_logits: bool) -> _Extents:
    """Say how much a graph's shape has room for: the most that its rows can need."""
    prefills, rows = shape.prefill_requests, shape.rows
    chunks = shape.prefill_tokens // sizes.scan_chunk_size + 2 * prefills
    return _Extents(
        tokens=shape.tokens,
        prefills=prefills,
        decodes=shape.decode_requests,
        snapshots=3 * prefills,
        scan_chunks=chunks,
        table_blocks=num_blocks_for(sizes.max_length, sizes.block_size),
        logits=shape.tokens if all_logits else rows,
        draws=rows,
        banned=_BANNED_WIDTH,
    )


def _measure(
    columns: _Columns,
    chunks: _Chunks,
    snapshots: _Snapshots,
    wanted: _Ints,
    drawn_for: list[Request],
) -> _Extents:
    """Count the entries that a step needs."""
    prefills = len(chunks.last)
    return _Extents(
        tokens=int(columns.lens.sum()),
        prefills=prefills,
        decodes=len(columns.lens) - prefills,
        snapshots=len(snapshots.rows),
        scan_chunks=len(chunks.rows),
        table_blocks=int(columns.table_lens.max(initial=0)),
        logits=len(wanted),
        draws=len(drawn_for),
        banned=max((len(r.banned_token_ids) for r in drawn_for), default=0),
    )


class _Layout:
    """Puts real entries in their places and harmless ones in all others.

    Where tokens or rows of both kinds share an array, those that prefill begin at the
    padded count of those that decode; in every other array real entries come first.
    """

    def __init__(self, real: _Extents, padded: _Extents, sizes: Sizes) -> None:
        self.real = real
        self.padded = padded
        self.sizes = sizes

    def tokens(
        self, columns: _Columns, tables: _Ints, token_ids: _Ints
    ) -> dict[str, _Array]:
        """Describe each token."""
        rows = np.repeat(np.arange(len(columns.lens)), columns.lens)
        positions = _ramps(columns.starts, columns.lens)
        blocks, places = np.divmod(positions, self.sizes.block_size)
        is_shared = blocks < columns.num_shared[rows]
        owned = np.where(is_shared, self.sizes.dummy_block, tables[rows, blocks])
        nowhere = self.sizes.dummy_block * self.sizes.block_size
        size = self.padded.tokens
        return {
            "token_ids": self._by_kind(token_ids, size, 0),
            "positions": self._by_kind(positions, size, 0),
            "token_mask": self._by_kind(np.ones(len(rows), np.bool_), size, 0),
            "kv_index": self._by_kind(
                owned * self.sizes.block_size + places, size, nowhere
            ),
        }

    def requests(self, columns: _Columns, tables: _Ints) -> dict[str, _Array]:
        """Describe each row, of either kind."""
        size = self.padded.decodes + self.padded.prefills
        lack = self.padded.table_blocks - self.real.table_blocks
        dummy = self.sizes.dummy_block
        wide = np.pad(tables, ((0, 0), (0, lack)), constant_values=dummy)
        return {
            "block_tables": self._by_kind(wide, size, dummy),
            "context_lens": self._by_kind(columns.ends, size, 0),
        }

    def decodes(self, columns: _Columns, rows: list[RowPlan]) -> dict[str, _Array]:
        """Describe each decode row."""
        dummy, size = self.sizes.dummy_slot, self.padded.decodes
        targets = [row.snapshots[0].slot_id if row.snapshots else dummy for row in rows]
        return {
            "decode_slot_ids": _filled(columns.slots[: len(rows)], size, dummy),
            "decode_snapshot_slot_ids": _filled(
                np.array(targets, np.int64), size, dummy
            ),
        }

    def prefills(self, columns: _Columns) -> dict[str, _Array]:
        """Describe each prefill row; a padded one takes zero to the dummy slot."""
        size, sizes = self.padded.prefills, self.sizes
        starts, lens, slots, initial = (
            column[self.real.decodes :]
            for column in (
                columns.starts,
                columns.lens,
                columns.slots,
                columns.initial_slots,
            )
        )
        return {
            "cu_prefill_lens": _offsets(_filled(lens, size, 0)),
            "prefill_starts": _filled(starts, size, 0),
            "prefill_slot_ids": _filled(slots, size, sizes.dummy_slot),
            "initial_slot_ids": _filled(initial, size, sizes.zero_slot),
        }

    def snapshots(
        self, columns: _Columns, chunks: _Chunks, snapshots: _Snapshots
    ) -> dict[str, _Array]:
        """Describe each state to be stored; a padded one goes to the dummy slot."""
        starts, lens = (
            column[self.real.decodes :] for column in (columns.starts, columns.lens)
        )
        before = _offsets(lens)[snapshots.rows]
        ends = before + snapshots.positions - starts[snapshots.rows]
        numbers = chunks.ending_at(snapshots, self.sizes.scan_chunk_size)
        size, dummy = self.padded.snapshots, self.sizes.dummy_slot
        return {
            "snapshot_rows": _filled(snapshots.rows, size, 0),
            "snapshot_ends": _filled(ends, size, 0),
            "snapshot_slot_ids": _filled(snapshots.slots, size, dummy),
            "snapshot_scan_chunks": _filled(numbers, size, 0),
        }

    def scan_chunks(self, chunks: _Chunks) -> dict[str, _Array]:
        """Describe each scan chunk; padded ones are empty parts of the last row.

        A padded row so has chunks of its own, which hand zero on; and where no row is
        padded, the last one's state passes through them unchanged.
        """
        size, rows = self.padded.scan_chunks, self.padded.prefills
        return {
            "cu_scan_chunks": _offsets(_filled(chunks.lens, size, 0)),
            "scan_chunk_rows": _filled(chunks.rows, size, rows - 1),
            "last_scan_chunks": _filled(chunks.last, rows, size - 1),
        }

    def logits(
        self, columns: _Columns, drawing: _Ints, wanted: _Ints
    ) -> dict[str, _Array]:
        """Say where logits are taken; a padded draw takes the first."""
        last_tokens = (np.cumsum(columns.lens) - 1)[drawing]
        # Logits are those of real tokens, packed: only their source is shifted.
        gap = self.padded.decodes - self.real.decodes
        shifted = wanted + gap * (wanted >= self.real.decodes)
        source = np.searchsorted(wanted, last_tokens)
        return {
            "logit_index": _filled(shifted, self.padded.logits, 0),
            "sample_index": _filled(source, self.padded.draws, 0),
        }

    def draws(self, positions: _Ints, requests: list[Request]) -> dict[str, _Array]:
        """Describe each draw; a padded one is greedy."""
        size, width = self.padded.draws, self.padded.banned
        sampling = [request.sampling for request in requests]
        banned = [request.banned_token_ids for request in requests]
        temperatures = np.array([s.temperature for s in sampling], np.float32)
        ids = np.full((size, width), -1, np.int64)
        lens = np.array([len(each) for each in banned] + [0] * (size - len(banned)))
        ids[np.arange(width) < lens[:, None]] = list(chain.from_iterable(banned))
        return {
            "draws.temperatures": _filled(temperatures, size, 0),
            "draws.top_ks": _filled(_integers(s.top_k for s in sampling), size, 0),
            "draws.top_ps": _filled(np.array([s.top_p for s in sampling]), size, 1),
            "draws.min_ps": _filled(np.array([s.min_p for s in sampling]), size, 0),
            "draws.seeds": _filled(_integers(s.seed for s in sampling), size, 0),
            "draws.positions": _filled(positions, size, 0),
            "draws.banned_ids": ids,
        }

    def _by_kind(self, values: _Array, size: int, fill: int) -> _Array:
        """Place what belongs to decode rows first, the rest from their padded end."""
        decodes, first = self.real.decodes, self.padded.decodes
        placed = _filled(values[:decodes], size, fill)
        placed[first : first + len(values) - decodes] = values[decodes:]
        return placed


def _token_ids(
    rows: list[RowPlan], requests: Mapping[str, Request], count: int
) -> _Ints:
    slices = (requests[row.request_id].token_ids[row.start : row.end] for row in rows)
    return np.fromiter(chain.from_iterable(slices), np.int64, count)


def _wanted_logits(
    columns: _Columns,
    rows: list[RowPlan],
    requests: Mapping[str, Request],
    all_logits: bool,
) -> _Ints:
    """Mark the tokens whose logits are wanted, then list the marks."""
    is_wanted = np.full(int(columns.lens.sum()), all_logits)
    first_tokens = _offsets(columns.lens)[:-1]
    spans = [requests[row.request_id].prompt_logit_positions for row in rows]
    first = np.maximum(_integers(span.start for span in spans), columns.starts)
    behind = np.minimum(_integers(span.stop for span in spans), columns.ends)
    shifted = first_tokens - columns.starts + first
    is_wanted[_ramps(shifted, np.maximum(behind - first, 0))] = True
    is_wanted[(np.cumsum(columns.lens) - 1)[columns.samples.astype(bool)]] = True
    return np.flatnonzero(is_wanted)


def _with_draws(arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Put the arrays that describe draws together."""
    draws = Draws(*(arrays.pop(f"draws.{name}") for name in Draws._fields))
    return {**arrays, "draws": draws}


def _integers(values: Iterable[int | None]) -> _Ints:
    """Make an array; None counts as 0."""
    return np.array([value or 0 for value in values], np.int64)


def _filled(values: _Array, size: int, fill: int) -> _Array:
    """Extend an array to a size."""
    filled = np.full((size, *values.shape[1:]), fill, values.dtype)
    filled[: len(values)] = values
    return filled


def _offsets(lens: _Ints) -> _Ints:
    """Return where packed pieces begin, and the end."""
    return np.concatenate(([0], np.cumsum(lens)))


def _ramps(starts: _Ints, lens: _Ints) -> _Ints:
    """Count up from each start, as many numbers as its length says."""
    shift = starts - _offsets(lens)[:-1]
    return np.arange(lens.sum()) + np.repeat(shift, lens)


def _ceil_divide(values: _Ints, divisor: int) -> _Ints:
    return -(-values // divisor)
