"""Whole engines of Triton kernels, interpreted: the reference's tokens and states."""

from __future__ import annotations

import pytest

from tests.engines import assert_equals_lone, drain, greedy, make_engine
from tests.scenarios.common import is_mixed, text, tiny

#: A step takes tenths of a second, so there are few.
MODEL = tiny("M*E-", vocab_size=61)
SAMPLING = greedy(3)


@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_an_engine_of_kernels_equals_the_reference(graphs: str) -> None:
    """Prompts in company, one of them cut; then one again, from a stored state."""
    engine = make_engine(
        MODEL,
        "optimized",
        kernels="triton",
        graphs=graphs,
        max_requests=3,
        max_tokens_per_step=24,
    )
    for index, length in enumerate((18, 5, 20)):
        engine.add(text(length, seed=index), SAMPLING)
    run = drain(engine)
    assert any(map(is_mixed, run.records))
    assert any(row.snapshots for record in run.records for row in record.rows)
    again = engine.add(text(20, seed=2), SAMPLING)
    run = drain(engine, run)
    assert run.outputs[again].cache.num_skipped_tokens == 16
    for output in run.outputs.values():
        assert_equals_lone(MODEL, output, run, SAMPLING)
