"""Engines for tests: build one, run it to the end, compare with a lone run.

The yardstick of every engine test is `lone`: the same request alone, its whole prompt
in one step, nothing cached. Log-probabilities of every position that was computed, and
tokens, must equal the lone run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.assemble import build_engine, settle_options
from lockstep.config import DebugCheck, EngineConfig, ModelConfig
from lockstep.memory import plan_memory, torch_dtype
from lockstep.parameters import ParameterKind, Parameters, make_parameters
from lockstep.request import RequestOutput, SamplingParams
from lockstep.trace import StepRecord
from lockstep.weights import WITNESS as WITNESS
from tests.tolerances import assert_logprobs

CPU = torch.device("cpu")
ALL_CHECKS: tuple[DebugCheck, ...] = ("integrity", "poison", "checksums")
#: Small pools and every check on; tests override what they are about.
DEFAULTS: dict[str, Any] = {
    "max_requests": 4,
    "max_tokens_per_step": 64,
    "num_blocks": 32,
    "snapshot_slots": 8,
    "record_logprobs": True,
    "debug": ALL_CHECKS,
}


@cache
def witness_parameters(
    config: ModelConfig, seed: int = 0, device: torch.device = CPU
) -> Parameters:
    """Draw weights with which a wrong state is seen in the log-probabilities.

    They are drawn on the CPU, so that they are the same on every device.
    """
    rule = replace(WITNESS, seed=seed)

    def fill(parameter: Tensor, name: str, kind: ParameterKind) -> None:
        drawn = torch.zeros(parameter.shape, dtype=parameter.dtype, device=CPU)
        rule.fill(drawn, name, kind)
        parameter.copy_(drawn)

    return make_parameters(config, torch_dtype(config.dtype), device, fill)


def make_engine(
    config: ModelConfig,
    side: str = "reference",
    components: dict[str, Any] | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> Any:
    """Build an engine with witness weights; options are those of `EngineConfig`."""
    if side == "padded":
        side, options = backend_of(side), {"graphs": "padded"} | options
    engine_config = EngineConfig(**{**DEFAULTS, **options})
    engine_config = settle_options(engine_config, side, device)
    parameters = witness_parameters(config, device=device)
    dtype = torch_dtype(config.dtype)
    sizes = plan_memory(config, engine_config, device, dtype)
    return build_engine(
        config, engine_config, sizes, parameters, device, side, components
    )


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    """Return greedy parameters that ignore end-of-sequence tokens."""
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 0}
    return SamplingParams(max_tokens=max_tokens, **(settings | options))


@dataclass
class Run:
    """What steps gave, gathered request by request.

    Attributes:
        outputs: Finished requests.
        logprobs: For each request, log-probabilities by position; a position computed
            more than once holds the latest.
        records: All step records.
        side: Whose steps they are.
    """

    outputs: dict[str, RequestOutput] = field(default_factory=dict[str, RequestOutput])
    logprobs: dict[str, dict[int, Tensor]] = field(
        default_factory=dict[str, dict[int, Tensor]]
    )
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    side: str = ""

    def note(self, record: StepRecord) -> StepRecord:
        """Take in one step's record."""
        self.records.append(record)
        for row in record.rows:
            if row.request_id in record.logprobs:
                rows = record.logprobs[row.request_id]
                mine = self.logprobs.setdefault(row.request_id, {})
                mine.update(zip(range(row.start, row.end), rows, strict=True))
        for output in record.finished:
            self.outputs[output.request_id] = output
        return record


def backend_of(side: str) -> str:
    """Return the side by which a test that may run at padded shapes finds its parts."""
    return "optimized" if side == "padded" else side


def side_of(engine: Any) -> str:
    """Return the side that an engine is of."""
    return type(engine).__module__.split(".")[1]


def drain(
    engine: Any,
    run: Run | None = None,
    between: Callable[[StepRecord], None] | None = None,
) -> Run:
    """Run an engine until it has nothing left to do.

    Args:
        engine: The engine.
        run: Takes the records; a new one when None.
        between: Called after each step.
    """
    run = run or Run()
    run.side = side_of(engine)
    while engine.has_work:
        record = run.note(engine.step())
        if between is not None:
            between(record)
    return run


def serve(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | None = None,
) -> tuple[list[RequestOutput], Run]:
    """Add all prompts at once and run to the end; outputs in order of the prompts."""
    names = [engine.add(list(prompt), sampling or greedy()) for prompt in prompts]
    run = drain(engine)
    return [run.outputs[name] for name in names], run


@cache
def _lone(
    config: ModelConfig,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    device: torch.device,
) -> tuple[RequestOutput, dict[int, Tensor]]:
    length = len(prompt) + sampling.max_tokens
    engine = make_engine(
        config,
        device=device,
        max_requests=1,
        max_tokens_per_step=length,
        num_blocks=length,
        prefix_caching=False,
        debug=(),
    )
    outputs, run = serve(engine, [prompt], sampling)
    return outputs[0], run.logprobs[outputs[0].request_id]


def lone(
    config: ModelConfig,
    prompt: Sequence[int],
    sampling: SamplingParams,
    device: torch.device = CPU,
) -> tuple[RequestOutput, dict[int, Tensor]]:
    """Serve one request alone, uncached, in one slice, on the reference side.

    Returns:
        Its output, and its log-probabilities by position.
    """
    return _lone(config, tuple(prompt), sampling, device)


def assert_equals_lone(
    config: ModelConfig,
    output: RequestOutput,
    run: Run,
    sampling: SamplingParams,
    device: torch.device = CPU,
) -> None:
    """Check that a request's every computed position equals the lone run's.

    On the reference side by bits; on the other within the class of whole engines. An
    aborted request is compared as far as it got.
    """
    truth, expected = lone(config, output.prompt_token_ids, sampling, device)
    assert output.token_ids == truth.token_ids[: len(output.token_ids)]
    if output.finish_reason not in ("abort", "error"):
        assert output.token_ids == truth.token_ids
    for position, values in run.logprobs.get(output.request_id, {}).items():
        try:
            assert_logprobs(run.side, values, expected[position])
        except AssertionError as error:
            name = output.request_id
            raise AssertionError(f"{name}, position {position}: {error}") from error
