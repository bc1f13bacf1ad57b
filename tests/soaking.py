"""A warm engine, pass after pass: nothing that it keeps may wear off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.plan import CacheReport, RowPlan
from lockstep.request import SamplingParams
from tests.engines import CPU, Run, greedy, lone
from tests.following import Ties, Twin, compare_draws, twin_of
from tests.matrix import default_device
from tests.scenarios.common import text
from tests.tolerances import assert_logprobs

#: Prompts, many with a common beginning, and how each is served.
SOAK = {
    f"r{index}": (
        [*text(16 * (index % 4), index % 3), *text(17 + index, index + 9)],
        greedy(6, temperature=0.7 * (index % 2), seed=index),
    )
    for index in range(50)
}
SIZES = {"max_requests": 16, "num_blocks": 300, "snapshot_slots": 200}
MODES = {"padded": "padded", "all": "graph"}


def assert_passes_equal(
    config: ModelConfig,
    graphs: str,
    device: torch.device,
    note: Callable[[str, object], None],
) -> None:
    """Serve all prompts five times on one engine.

    Whatever was skipped, each position computed and each token drawn is that of the
    request alone, so no pass differs from the first; and from the second on, each finds
    in the cache what the one before did.
    """
    ties, twin = Ties(), twin_of(config, graphs, tuple(SIZES.items()), device)
    twin.begin()
    passes = [_soak(twin, graphs, ties) for _ in range(5)]
    assert passes[0] != passes[1]
    assert all(each == passes[1] for each in passes[1:])
    assert all(report.num_skipped_tokens for report in passes[1].values())
    ties.report(note, config.dtype)


def _soak(twin: Twin, graphs: str, ties: Ties) -> dict[str, CacheReport]:
    """Serve all prompts once, each held to itself alone; return what was skipped."""
    config = twin.engine.model_config
    with default_device(CPU):
        alone = {name: lone(config, *request) for name, request in SOAK.items()}
    tokens = {name: output.token_ids for name, (output, _) in alone.items()}

    def truth(row: RowPlan) -> tuple[int, Tensor, SamplingParams]:
        prompt, sampling = SOAK[row.request_id]
        token = tokens[row.request_id][row.end - len(prompt)]
        return token, alone[row.request_id][1][row.end - 1], sampling

    for name, (prompt, sampling) in SOAK.items():
        twin.engine.add(prompt, sampling, name)
    run, came = Run(), Counter[str]()
    while twin.engine.has_work:
        forced = {n: tokens[n][came[n]] for n in SOAK if came[n] < len(tokens[n])}
        record = run.note(twin.step(tokens=forced)[0])
        came.update(list(record.tokens))
        assert record.mode == MODES[graphs]
        compare_draws(twin, record.plan, truth, ties)
    for name, rows in run.logprobs.items():
        for position, values in rows.items():
            assert_logprobs("optimized", values, alone[name][1][position])
    assert {name: each.token_ids for name, each in run.outputs.items()} == tokens
    return {name: each.cache for name, each in run.outputs.items()}
