"""What surrounds a step, the same on both sides: how requests come, end, and fail.

A side's engine adds the six phases of a step. Nothing here is on the way of a step that
goes well, so there is nothing that one side could do faster.
"""

from __future__ import annotations

import copy
import secrets
import signal
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lockstep.blocks import num_blocks_for
from lockstep.config import EngineConfig, ModelConfig, Sizes
from lockstep.debug import (
    ContentKey,
    check_zero_slot,
    checksum_shared,
    compare_checksums,
    poison,
)
from lockstep.errors import IntegrityError, PlanError, RequestError
from lockstep.interfaces import Components
from lockstep.memory import Caches, allocate_caches
from lockstep.parameters import Parameters
from lockstep.plan import RowPlan, StepPlan
from lockstep.policy import departure
from lockstep.request import (
    MAX_SEED,
    FinishReason,
    Request,
    RequestOutput,
    RequestState,
    SamplingParams,
)
from lockstep.trace import EngineState, StepRecord

#: Finished requests whose tokens are remembered, to explain a later miss.
REMEMBERED_REQUESTS = 64


@contextmanager
def _interrupts_held() -> Generator[None]:
    """Let an interrupt from the keyboard wait for the end of a step.

    Between any two lines of the bookkeeping it would leave half of something behind. A
    second one does not wait, and nothing but Python's own handler is replaced.
    """
    usual, held = signal.default_int_handler, list[int]()

    def hold(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, usual)
        held.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if held:
        raise KeyboardInterrupt


class Lifecycle:
    """Takes requests in, lets them out, and keeps one's fault from harming others."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        sizes: Sizes,
        parameters: Parameters,
        components: Components,
        device: torch.device,
    ) -> None:
        """Allocate all memory and put the parts together.

        Args:
            model_config: The model.
            engine_config: Options.
            sizes: All sizes, settled by `lockstep.memory.plan_memory`.
            parameters: The model's parameters, on ``device``.
            components: The parts to use.
            device: Where everything runs.
        """
        self.model_config = model_config
        self.engine_config = engine_config
        self.sizes = sizes
        self.components = components
        self.caches: Caches = allocate_caches(
            model_config, engine_config, sizes, parameters.embedding.dtype, device
        )
        self.blocks = components.BlockPool(sizes.num_blocks, engine_config.eviction)
        self.slots = components.StateSlots(sizes.max_requests, sizes.snapshot_slots)
        self.cache = components.PrefixCache(
            self.blocks,
            self.slots,
            sizes,
            model_config.num_mamba_layers > 0,
            engine_config.prefix_caching,
        )
        self.scheduler: Any = components.Scheduler(sizes, self.cache)
        self.metadata = components.MetadataBuilder(sizes, device)
        self.model = components.Model(
            model_config, sizes, parameters, components, device
        )
        self.arrivals = 0
        self.is_stepping = False
        self._unclaimed: list[RequestOutput] = []
        self.history: deque[RequestOutput] = deque(maxlen=REMEMBERED_REQUESTS)
        self._start()
        self._poison()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or its output not yet in a record."""
        return self.scheduler.has_work or bool(self._unclaimed)

    def check(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
    ) -> None:
        """Say whether a request can be admitted and, if nothing else runs, finished.

        Raises:
            RequestError: It cannot; the message names value and limit.
        """
        length = len(prompt_token_ids)
        if not length:
            raise RequestError("the prompt is empty; it must have at least one token")
        vocab = self.model_config.vocab_size
        bad = [t for t in prompt_token_ids if type(t) is not int or not 0 <= t < vocab]
        if bad:
            raise RequestError(f"token ids {bad[:5]} are not integers in [0, {vocab})")
        total = length + sampling.max_tokens
        if total > self.sizes.max_length:
            raise RequestError(
                f"a prompt of {length} tokens and max_tokens={sampling.max_tokens} "
                f"come to {total}; max_length is {self.sizes.max_length}"
            )
        # The last token drawn is never computed, so it needs no place.
        needed = num_blocks_for(total - 1, self.sizes.block_size)
        if needed > self.sizes.num_blocks:
            raise RequestError(
                f"{total - 1} tokens need {needed} blocks of {self.sizes.block_size}; "
                f"the pool has {self.sizes.num_blocks}"
            )
        self._check_sampling(length, sampling)
        if request_id is not None and request_id in self._request_ids():
            raise RequestError(f"a request named {request_id!r} is still in flight")

    def _check_sampling(self, length: int, sampling: SamplingParams) -> None:
        """Hold sampling parameters to the vocabulary and to the prompt's length."""
        vocab = self.model_config.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(sampling, name) or 0
            if count > vocab:
                raise RequestError(f"{name} is {count}; the vocabulary has {vocab}")
        bad = [token for token in sampling.stop_token_ids if token >= vocab]
        if bad:
            raise RequestError(f"stop_token_ids {bad[:5]} are not in [0, {vocab})")
        first = sampling.prompt_logprobs_from
        if first >= length:
            raise RequestError(
                f"prompt_logprobs_from is {first}; the prompt has {length} tokens"
            )
        ends = {*sampling.stop_token_ids, *self._eos_token_ids(sampling)}
        if sampling.min_tokens and len(ends) >= vocab:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, but all {vocab} tokens of the "
                "vocabulary end the request"
            )

    def _eos_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """List the end-of-sequence tokens that end a request.

        Some checkpoints name tokens beyond their vocabulary, which are never drawn.
        """
        eos, vocab = self.model_config.eos_token_ids, self.model_config.vocab_size
        return () if sampling.ignore_eos else tuple(t for t in eos if t < vocab)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
    ) -> str:
        """Put a request into the queue.

        Args:
            prompt_token_ids: The prompt.
            sampling: How tokens are drawn; without a seed it gets one.
            request_id: Its name; made up when None.

        Returns:
            The request's name.

        Raises:
            RequestError: It cannot be served; nothing else is disturbed.
        """
        self.check(prompt_token_ids, sampling, request_id)
        self.arrivals += 1
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED))
        request = Request(
            request_id=request_id or self._new_id(),
            prompt_token_ids=list(prompt_token_ids),
            sampling=sampling,
            eos_token_ids=self._eos_token_ids(sampling),
            arrival=self.arrivals,
        )
        request.differs_from = self._departure(request.prompt_token_ids)
        self.scheduler.add(request)
        return request.request_id

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> RequestOutput | None:
        """End a request, in whatever phase it is; an unknown one is ignored.

        Called while a step is running, it takes effect at the end of that step, whose
        record then has the output: memory is never taken from under a forward pass.

        Args:
            request_id: The request.
            reason: What its output gives as reason; `FinishReason.STOP` when its text
                has come to a stop string, which only the caller can see.

        Returns:
            What the request gave so far; None if it is not in flight or a step is
            running.
        """
        for output in self._unclaimed:
            if output.request_id == request_id:
                self._unclaimed.remove(output)
                return output
        if request_id not in self._request_ids():
            return None
        request = self.scheduler.find(request_id)
        if self.is_stepping:
            request.abort_reason = reason
            return None
        return self._finish(request, reason)

    def step(
        self, plan: StepPlan | None = None, tokens: Mapping[str, int] | None = None
    ) -> StepRecord:
        """Run one step.

        An interrupt from the keyboard waits for its end. What had finished in a step
        that raised is in the record of the next.

        Args:
            plan: A recorded plan to carry out instead of making one.
            tokens: Tokens to use instead of those drawn, by request.

        Returns:
            What the step did.

        Raises:
            PlanError: ``plan`` cannot be carried out here.
            IntegrityError: A check asked for by ``EngineConfig.debug`` failed.
            Exception: What planning failed with, if no request is to blame for it.
        """
        record = StepRecord(step=self.scheduler.step + 1)
        try:
            with _interrupts_held():
                record.finished, self._unclaimed = self._unclaimed, []
                self._step(plan, tokens or {}, record)
        except BaseException:
            self._unclaimed = record.finished
            raise
        return record

    def _step(
        self, plan: StepPlan | None, tokens: Mapping[str, int], record: StepRecord
    ) -> None:
        """Run the phases, deal with what they raise, and check what is left."""
        before = self._checksums()
        try:
            self.is_stepping = True
            self._run(plan, tokens, record)
        except BaseException as error:
            if not self._recover(error, record):
                raise
        finally:
            self.is_stepping = False
        self._finish_aborted(record)
        self._check_after_step(before)

    def drain(self) -> list[RequestOutput]:
        """Run steps until every request is done."""
        outputs: list[RequestOutput] = []
        while self.has_work:
            outputs += self.step().finished
        return outputs

    def reset(self, keep_cache: bool = False) -> None:
        """Abort every request and, unless told otherwise, forget all cached content.

        Args:
            keep_cache: Whether blocks and snapshots stay for later requests.

        Raises:
            RequestError: A step is running.
        """
        if self.is_stepping:
            raise RequestError("a step is running; reset the engine when it has ended")
        self._unclaimed = []
        for request_id in self._request_ids():
            self.abort(request_id)
        if not keep_cache:
            self.cache.reset()
            self.history.clear()
        self._poison()

    def export_state(self) -> EngineState:
        """Copy everything the engine knows; only between steps."""
        return EngineState(
            step=self.scheduler.step,
            arrivals=self.arrivals,
            admissions=self.scheduler.admissions,
            waiting=copy.deepcopy(self.scheduler.waiting),
            running=copy.deepcopy(self.scheduler.running),
            blocks=self.blocks.export_state(),
            slots=self.slots.export_state(),
            caches=Caches(*(pool.clone() for pool in self.caches.tensors())),
        )

    def import_state(self, state: EngineState) -> None:
        """Take over the state of another engine with the same model and sizes."""
        self.scheduler.step = state.step
        self.scheduler.admissions = state.admissions
        self.scheduler.waiting = copy.deepcopy(state.waiting)
        self.scheduler.running = copy.deepcopy(state.running)
        self.scheduler.solo = []
        self.arrivals = state.arrivals
        self.blocks.import_state(state.blocks)
        self.slots.import_state(state.slots)
        for mine, theirs in zip(
            self.caches.tensors(), state.caches.tensors(), strict=True
        ):
            mine.copy_(theirs)

    def check_integrity(self) -> None:
        """Check every invariant of the bookkeeping; only between steps.

        Raises:
            IntegrityError: One does not hold.
        """
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.blocks.check_integrity([request.block_table for request in running])
        self.slots.check_integrity(
            [request.slot_id for request in running if request.slot_id is not None],
            set(self.blocks.export_state().hashes.values()),
        )
        for request in running:
            held = len(request.block_table) * self.sizes.block_size
            if request.num_computed > min(held, len(request.token_ids)):
                raise IntegrityError(
                    f"{request.request_id!r} has computed {request.num_computed} "
                    f"tokens; its blocks hold {held}"
                )
        for request in waiting:
            if request.block_table or request.slot_id is not None:
                raise IntegrityError(f"{request.request_id!r} waits but holds memory")
        if self.model_config.num_mamba_layers:
            check_zero_slot(self.caches, self.sizes)

    # What a side adds.

    def _start(self) -> None:
        """Make whatever a side needs besides the parts that both have."""

    def _run(
        self, recorded: StepPlan | None, tokens: Mapping[str, int], record: StepRecord
    ) -> None:
        """Carry out the six phases; any of them may raise."""
        raise NotImplementedError

    # What the phases lean on.

    def _find(self, row: RowPlan) -> Request:
        """Find the request of a row."""
        return self.scheduler.find(row.request_id)

    def _request_ids(self) -> list[str]:
        """Name every request in flight."""
        everyone = (*self.scheduler.running, *self.scheduler.waiting)
        return [request.request_id for request in everyone]

    def _new_id(self) -> str:
        """Make up a name that nobody in flight has."""
        taken = set(self._request_ids())
        number = self.arrivals
        while f"request-{number}" in taken:
            number += 1
        return f"request-{number}"

    def _append(self, request: Request, record: StepRecord) -> None:
        """Append the token drawn for a request, and end it if it is done."""
        token = record.tokens[request.request_id]
        request.token_ids.append(token)
        request.state = RequestState.DECODE
        if request.request_id in record.reported:
            request.logprobs.append(record.reported[request.request_id])
        request.timings.add_token()
        if token in request.end_token_ids:
            record.finished.append(self._finish(request, FinishReason.STOP))
        elif request.num_generated == request.sampling.max_tokens:
            record.finished.append(self._finish(request, FinishReason.LENGTH))

    def _finish(
        self, request: Request, reason: FinishReason, error: str = ""
    ) -> RequestOutput:
        """End a request, free all it holds, and sum it up."""
        request.finish_reason = reason
        request.error = error
        self.scheduler.remove(request)
        output = request.output()
        self.history.append(output)
        return output

    def _departure(self, prompt: list[int]) -> int | None:
        """Find where a prompt leaves what an earlier request generated."""
        found = [
            departure(
                prompt,
                earlier.prompt_token_ids + earlier.token_ids,
                len(earlier.prompt_token_ids),
            )
            for earlier in self.history
        ]
        return max((each for each in found if each is not None), default=None)

    def _split_logprobs(self, plan: StepPlan, logits: Tensor) -> dict[str, Tensor]:
        """Give each row the log-probabilities of the positions that it computed."""
        logprobs = self.components.log_probabilities(logits)
        rows = plan.decode_rows + plan.prefill_rows
        parts = logprobs.split([row.num_tokens for row in rows])
        return {row.request_id: part for row, part in zip(rows, parts, strict=True)}

    def _recover(self, error: BaseException, record: StepRecord) -> bool:
        """Undo a failed step; end the request at fault, or find out which it is.

        Where no single request can be blamed, those of the step run alone; the one that
        fails again is at fault. What fails once and never again ends nobody.

        Returns:
            Whether the error is dealt with; if not, the caller must hear of it.
        """
        suspect = self.scheduler.suspect
        self.scheduler.suspect = None
        for request in self.scheduler.roll_back():
            record.interrupted.append(request.request_id)
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason)
                record.finished.append(request.output())
        if isinstance(error, PlanError) or not isinstance(error, Exception):
            return False
        suspect = suspect or self.scheduler.ran_alone(record.plan)
        if suspect is None:
            self.scheduler.run_alone(record.plan)
        elif suspect.finish_reason is None:
            message = f"{type(error).__name__}: {error}"
            record.failed[suspect.request_id] = message
            output = self._finish(suspect, FinishReason.ERROR, message)
            record.finished.append(output)
        return suspect is not None or bool(record.rows)

    def _finish_aborted(self, record: StepRecord) -> None:
        """End the requests that were aborted while the step ran."""
        for request_id in self._request_ids():
            request = self.scheduler.find(request_id)
            if request.abort_reason is not None:
                record.aborted.append(request_id)
                output = self._finish(request, request.abort_reason)
                record.finished.append(output)

    # Checks, when asked for.

    def _checksums(self) -> dict[ContentKey, int]:
        """Take checksums of all that is shared, if asked for."""
        if "checksums" not in self.engine_config.debug:
            return {}
        blocks, slots = self.blocks.export_state(), self.slots.export_state()
        return checksum_shared(self.caches, blocks.hashes, slots.stored)

    def _check_after_step(self, before: dict[ContentKey, int]) -> None:
        """Run the checks that were asked for."""
        compare_checksums(before, self._checksums())
        if "integrity" in self.engine_config.debug:
            self.check_integrity()
        self._poison()

    def _poison(self) -> None:
        """Fill free blocks and slots with NaN, if asked for."""
        if "poison" in self.engine_config.debug:
            blocks, slots = self.blocks.export_state(), self.slots.export_state()
            free = slots.free_live + slots.free_snapshots
            poison(self.caches, blocks.free, free)
