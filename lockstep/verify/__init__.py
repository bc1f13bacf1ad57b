"""Two engines in lockstep: the same steps from the same state, compared after each.

The *oracle* plans and runs; the *subject* carries out the same plan under the same
tokens and begins each step from the oracle's state, so that an error is that of one
step alone (``free_running`` lets errors add up instead). Integers are compared exactly,
floats within `exactness.BUDGETS`. On a difference the verdict names the first step,
layer, operation, tensor, request and position, and the component to blame: the one of
the subject whose replacement by the oracle's makes the step equal.

    from lockstep.verify import verify

    print(verify("reference", {"scan.scan_decode": my_scan_decode}))
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.assemble import OPTIMIZED_ONLY
from lockstep.config import ModelConfig

from .report import Difference as Difference
from .report import Verdict as Verdict
from .report import show as show
from .run import Run
from .scenes import MODELS as MODELS
from .scenes import scenes as scenes
from .sides import Arrival as Arrival
from .sides import Disturbance as Disturbance
from .sides import Setup as Setup
from .sides import Side as Side
from .sides import Workload as Workload
from .sides import make_setup


def verify(
    subject: str | Side = "optimized",
    components: Mapping[str, Any] | None = None,
    *,
    oracle: str | Side = "reference",
    model: str | ModelConfig | None = None,
    workload: Workload | None = None,
    device: str = "cpu",
    free_running: bool = False,
    bitwise: bool = False,
    truth: bool = False,
    **options: Any,
) -> Verdict:
    """Run two engines step by step, up to the first difference.

    Args:
        subject: Backend to be judged, or a `Side`.
        components: Components of it that are replaced.
        oracle: Backend that is right, or a `Side`.
        model: One of `MODELS` (tiny, with random weights under which a wrong state is
            seen), ``demo``, a checkpoint folder, or a config to be filled; each
            workload's own unless set.
        workload: What both are given; the default `scenes` unless set.
        device: Where both run.
        free_running: Whether the subject goes on from its own state.
        bitwise: Whether floats are compared bit by bit: where both compute in the same
            shapes and order.
        truth: Whether the reference runs in float64, too, to say how far off both are.
        options: Further options of `EngineConfig`; those that only the optimized
            backend has go to the subject alone.

    Raises:
        ConfigError: A side, component or option that does not exist.
    """
    judged = Side(subject) if isinstance(subject, str) else subject
    alone = {name: options.pop(name) for name in OPTIMIZED_ONLY if name in options}
    judged = replace(
        judged,
        components={**judged.components, **(components or {})},
        options={**judged.options, **alone},
    )
    sides = Side(oracle) if isinstance(oracle, str) else oracle, judged
    verdict = Verdict(str(sides[0]), str(sides[1]))
    begin = time.perf_counter()
    for each in [workload] if workload else scenes():
        given = {**each.options, **options}
        where = torch.device(device)
        setup = make_setup(model or each.model, MODELS, given, where)
        Run(setup, sides, each, free_running, bitwise, truth).go(verdict)
        if not verdict.equal:
            break
    verdict.seconds = time.perf_counter() - begin
    return verdict
