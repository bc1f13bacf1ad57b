"""The engine: the same six phases, with one copy to the device and one read from it.

A step's index arrays go to the device in one copy. What is wanted of the results, the
tokens drawn and such log-probabilities as were asked for, is put into one tensor there
and read at once; nothing else is read back. In between the host is not needed, so the
forward pass can be a graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.errors import ConfigError
from lockstep.lifecycle import Lifecycle
from lockstep.plan import BatchShape, RowPlan, StepPlan
from lockstep.request import Request
from lockstep.trace import StepRecord

from .graphs import GraphRunner, show_progress


class Engine(Lifecycle):
    """Runs requests step by step, as the reference does."""

    def _start(self) -> None:
        """Make the padded shapes known, and capture their graphs if asked for."""
        self._check_fit()
        config, shapes = self.engine_config, self.sizes.graph_shapes
        self.graphs = GraphRunner(
            config.graphs or "off",
            lambda batch: self.model.forward(batch, self.caches),
            lambda shape: self.metadata._pad(shape, config.record_logprobs),
            shapes,
        )
        if config.graphs in ("decode", "all"):
            try:
                with torch.inference_mode():
                    show_progress(self._capture(), len(shapes))
            except RuntimeError as error:
                # Said by the allocator, by the driver, or by who loads a kernel.
                if "out of memory" not in str(error):
                    raise
                raise ConfigError(
                    f"the device has too little memory left to capture {len(shapes)} "
                    "graphs; lower memory_fraction, max_tokens_per_step or "
                    'max_requests, or use graphs="decode" '
                    f"({str(error).splitlines()[0]})"
                ) from error

    def _check_fit(self) -> None:
        """Let kernels refuse heads that are too wide for them.

        Raises:
            ConfigError: Sizes that fit no tile.
        """
        config = self.model_config
        chunk = self.sizes.scan_chunk_size
        mamba = config.mamba and replace(config.mamba, scan_chunk_size=chunk)
        parts = self.components.scan_prefill, self.components.attend_prefill
        for part, shape in zip(parts, (mamba, config.attention), strict=True):
            home = sys.modules.get(getattr(part, "__module__", ""))
            check = getattr(home, "check_fit", None)
            if shape and check:
                check(shape, self.model.parameters.embedding.dtype)

    def _capture(self) -> Iterator[BatchShape]:
        """Capture every shape, and draw at each: nothing is left to compile later."""
        for shape in self.graphs.capture():
            batch = self.metadata._pad(shape, self.engine_config.record_logprobs)
            logits = self.graphs.run(batch).logits
            self.components.sample(logits[batch.sample_index], batch.draws)
            self.components.log_probabilities(logits[:1])
            yield shape

    def _run(
        self, recorded: StepPlan | None, tokens: Mapping[str, int], record: StepRecord
    ) -> None:
        """Carry out the six phases; any of them may raise."""
        record.plan = plan = self.scheduler.plan(recorded)
        record.shape = record.padded_shape = plan.shape
        if not plan.rows:
            return
        batch = self._prepare(plan)
        record.padded_shape = batch.padded_shape
        logits = self._forward(batch, record)
        self._commit(plan, record)
        self._sample(batch, plan, logits, tokens, record)
        self._update(plan, record)
        self.scheduler.clear_suspicion()

    def _prepare(self, plan: StepPlan) -> BatchMetadata:
        """Lay the plan out as index arrays; one copy takes them to the device."""
        requests = {row.request_id: self._find(row) for row in plan.rows}
        return self.metadata.build(plan, requests, self.engine_config.record_logprobs)

    def _forward(self, batch: BatchMetadata, record: StepRecord) -> Tensor:
        """Run the model over all rows, by a graph where there is one."""
        with torch.inference_mode():
            forward = self.graphs.run(batch)
        record.mode, record.eager_reason = forward.mode, forward.eager_reason
        return forward.logits

    def _commit(self, plan: StepPlan, record: StepRecord) -> None:
        """Publish what the forward pass has computed, or will have: the host is ahead.

        Whoever finds it reads it in a later step, behind this one on the device.
        """
        now = self.scheduler.commit(plan)
        record.registered_blocks, record.stored_states = now

    def _sample(
        self,
        batch: BatchMetadata,
        plan: StepPlan,
        logits: Tensor,
        forced: Mapping[str, int],
        record: StepRecord,
    ) -> None:
        """Draw all tokens, and read them with all log-probabilities at once."""
        rows = [row for row in plan.decode_rows + plan.prefill_rows if row.samples]
        if self.engine_config.record_logprobs:
            record.logprobs = self._split_logprobs(plan, logits[: batch.num_logits])
        reports = self._list_reports(plan, forced)
        if not rows and not reports:
            return
        drawn = self.components.sample(logits[batch.sample_index], batch.draws)
        values = iter(self._read(drawn[: len(rows)], logits, reports))
        record.host_reads += 1
        for row, token in zip(rows, islice(values, len(rows)), strict=False):
            record.tokens[row.request_id] = forced.get(row.request_id, int(token))
        for report in reports:
            self._note(report, values, record)

    def _update(self, plan: StepPlan, record: StepRecord) -> None:
        """Append what was drawn and reported, and end the requests that are done."""
        for row in plan.rows:
            self.scheduler.suspect = request = self._find(row)
            request.prompt_logprobs += record.prompt_reported.get(row.request_id, [])
            if row.samples:
                self._append(request, record)
        self.scheduler.suspect = None

    # What the phases lean on.

    def _list_reports(self, plan: StepPlan, forced: Mapping[str, int]) -> list[_Report]:
        """List the positions of which log-probabilities were asked for.

        Logits are packed, so where a row's begin follows from the rows before it.
        """
        reports: list[_Report] = []
        requests = {row.request_id: self._find(row) for row in plan.rows}
        if not any(map(_asks_for_reports, requests.values())):
            return reports
        offset = num_drawn = 0
        for row in plan.decode_rows + plan.prefill_rows:
            request = requests[row.request_id]
            positions = request.logit_positions(row.start, row.end, row.samples)
            first, wanted = offset, request.prompt_logit_positions
            if self.engine_config.record_logprobs:
                positions = list(range(row.start, row.end))
            offset += len(positions)
            count = request.sampling.prompt_logprobs or 0
            reports += [
                _Report(row, first + index, count, request.token_ids[position + 1])
                for index, position in enumerate(positions)
                if position in wanted
            ]
            if row.samples and request.sampling.logprobs is not None:
                token = forced.get(row.request_id)
                count = request.sampling.logprobs
                reports.append(_Report(row, offset - 1, count, token, num_drawn))
            num_drawn += row.samples
        return reports

    def _read(
        self, drawn: Tensor, logits: Tensor, reports: list[_Report]
    ) -> list[float]:
        """Read tokens and log-probabilities from the device as one list of numbers.

        Float64 holds both token ids and float32 values exactly.

        Returns:
            The tokens drawn; then for each report the log-probability of its token,
            the likeliest tokens, and their log-probabilities.
        """
        parts = [drawn.double()]
        if reports:
            chosen = torch.stack([logits[report.logit] for report in reports])
            logprobs = self.components.log_probabilities(chosen)
            ordered = torch.sort(logprobs, descending=True, stable=True)
            for number, report in enumerate(reports):
                token = drawn[report.draw] if report.token is None else report.token
                own = logprobs[number].index_select(0, _as_index(token, logits.device))
                best, ids = (part[number, : report.num_likeliest] for part in ordered)
                parts += [own.double(), ids.double(), best.double()]
        return torch.cat(parts).tolist()

    def _note(
        self, report: _Report, values: Iterator[float], record: StepRecord
    ) -> None:
        """Take a report's numbers from those read, and put it where it belongs."""
        name, most = report.row.request_id, report.num_likeliest
        own, *numbers = islice(values, 1 + 2 * most)
        likeliest = dict(zip(map(int, numbers[:most]), numbers[most:], strict=True))
        if report.is_drawn:
            record.reported[name] = {record.tokens[name]: own} | likeliest
        else:
            found = {cast(int, report.token): own} | likeliest
            record.prompt_reported.setdefault(name, []).append(found)


class _Report(NamedTuple):
    """One position of which log-probabilities were asked for.

    Attributes:
        row: Its row.
        logit: Row of the logits.
        num_likeliest: How many of the likeliest tokens are reported besides.
        token: The token that stands behind it; None if it is drawn in this step.
        draw: Which of the tokens drawn it is; -1 for a token of the prompt.
    """

    row: RowPlan
    logit: int
    num_likeliest: int
    token: int | None
    draw: int = -1

    @property
    def is_drawn(self) -> bool:
        """Whether the token is drawn, or forced, in this step."""
        return self.draw >= 0


def _asks_for_reports(request: Request) -> bool:
    """Say whether any log-probability of a request is to be read."""
    sampling = request.sampling
    return sampling.logprobs is not None or sampling.prompt_logprobs is not None


def _as_index(token: Tensor | int, device: torch.device) -> Tensor:
    """Make an index of one entry, without reading it where it is on the device."""
    if isinstance(token, Tensor):
        return token[None]
    return torch.full((1,), token, dtype=torch.int64, device=device)
