"""The engine: one step after another until every request is done.

A step has six phases, each a method below, in this order:

1. *plan*: decide the rows, reserve blocks and slots;
2. *prepare*: lay the plan out as index arrays;
3. *forward*: run the model; states and K/V are written on the way;
4. *commit*: publish what was computed, so that others can find it;
5. *sample*: draw one token for every row that reached its last token;
6. *update*: append tokens, finish requests.

Whatever fails in a step harms at most the request at fault: all others are computed
again from what the cache holds, with the same result (`lockstep.lifecycle`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.lifecycle import Lifecycle
from lockstep.plan import RowPlan, StepPlan
from lockstep.trace import StepRecord


class Engine(Lifecycle):
    """Runs requests step by step, many at a time."""

    def _run(
        self, recorded: StepPlan | None, tokens: Mapping[str, int], record: StepRecord
    ) -> None:
        """Carry out the six phases; any of them may raise."""
        record.plan = plan = self.scheduler.plan(recorded)
        record.shape = record.padded_shape = plan.shape
        if not plan.rows:
            return
        batch = self._prepare(plan)
        logits = self._forward(batch)
        self._commit(plan, record)
        self._sample(batch, plan, logits, tokens, record)
        self._update(plan, record)
        self.scheduler.clear_suspicion()

    def _prepare(self, plan: StepPlan) -> BatchMetadata:
        """Lay the plan out as index arrays on the device."""
        requests = {row.request_id: self._find(row) for row in plan.rows}
        return self.metadata.build(plan, requests, self.engine_config.record_logprobs)

    def _forward(self, batch: BatchMetadata) -> Tensor:
        """Run the model over all rows.

        Live slots and K/V blocks move on as it goes, so a failure in here leaves them
        half written: `_recover` sends every running request back.
        """
        with torch.inference_mode():
            return self.model.forward(batch, self.caches)

    def _commit(self, plan: StepPlan, record: StepRecord) -> None:
        """Publish what the forward pass has computed: from here on it can be found."""
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
        """Draw a token for every row that reached the end of what it had to compute.

        A row in the middle of its prompt may have logits, but nothing is drawn from
        them.

        Args:
            batch: The step's arrays.
            plan: The step's rows.
            logits: One row for every token wanted.
            forced: Tokens to use instead of those drawn.
            record: Takes tokens and log-probabilities.
        """
        rows = [row for row in plan.decode_rows + plan.prefill_rows if row.samples]
        if self.engine_config.record_logprobs:
            record.logprobs = self._split_logprobs(plan, logits)
        self._report_prompts(plan, logits, record)
        if not rows:
            return
        logits = logits[batch.sample_index]
        drawn = self.components.sample(logits, batch.draws).tolist()
        record.host_reads += 1
        for row, token in zip(rows, drawn, strict=True):
            record.tokens[row.request_id] = forced.get(row.request_id, token)
        self._report_logprobs(rows, logits, record)

    def _update(self, plan: StepPlan, record: StepRecord) -> None:
        """Append what was drawn and reported, and end the requests that are done.

        Appending and judging stand together: a failure between two requests leaves none
        with a token too many.
        """
        for row in plan.rows:
            self.scheduler.suspect = request = self._find(row)
            request.prompt_logprobs += record.prompt_reported.get(row.request_id, [])
            if row.samples:
                self._append(request, record)
        self.scheduler.suspect = None

    # What the phases lean on.

    def _report_prompts(
        self, plan: StepPlan, logits: Tensor, record: StepRecord
    ) -> None:
        """Note prompt tokens for the requests that asked for them.

        A token's probability follows from the logits after the token before it.
        """
        offset = 0
        for row in plan.decode_rows + plan.prefill_rows:
            request = self._find(row)
            positions: Sequence[int] = range(row.start, row.end)
            if not self.engine_config.record_logprobs:
                positions = request.logit_positions(row.start, row.end, row.samples)
            wanted, count = request.prompt_logit_positions, request.sampling
            found = [
                self._describe(
                    logits[offset + index],
                    request.token_ids[position + 1],
                    count.prompt_logprobs or 0,
                )
                for index, position in enumerate(positions)
                if position in wanted
            ]
            if found:
                record.prompt_reported[row.request_id] = found
                record.host_reads += len(found)
            offset += len(positions)

    def _report_logprobs(
        self, rows: list[RowPlan], logits: Tensor, record: StepRecord
    ) -> None:
        """Note the likeliest tokens for the requests that asked for them."""
        for index, row in enumerate(rows):
            count = self._find(row).sampling.logprobs
            if count is None:
                continue
            token = record.tokens[row.request_id]
            record.reported[row.request_id] = self._describe(
                logits[index], token, count
            )
            record.host_reads += 1

    def _describe(self, logits: Tensor, token: int, count: int) -> dict[int, float]:
        """Return log-probabilities of a token and the likeliest, ties by lowest id.

        Args:
            logits: Of one position.
            token: The token that stands, or will stand, behind it.
            count: How many of the likeliest.
        """
        values = self.components.log_probabilities(logits[None])[0]
        best = torch.sort(values, descending=True, stable=True).indices[:count]
        chosen = dict.fromkeys([token, *best.tolist()])
        return dict(zip(chosen, values[list(chosen)].tolist(), strict=True))
