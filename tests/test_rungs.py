"""The table of rungs: whole, in order, and every rung an engine that works."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import rungs
from lockstep.assemble import BACKENDS, build_components
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.interfaces import component_keys
from lockstep.rungs import RUNGS, Rung
from tests.engines import Run, drain, greedy, make_engine
from tests.factories import model_config
from tests.tolerances import assert_budgeted

NAMES = [rung.name for rung in RUNGS]
#: Rungs whose options a CPU has, too.
ON_CPU = [name for name in NAMES if name not in NAMES[NAMES.index("decode graphs") :]]
FORMS = [(rung.name, form) for rung in RUNGS for form in rung.before]
#: Shared beginnings, whole blocks and parts of them.
PROMPTS = ([1] * 40, [1] * 33 + [2] * 20, [1] * 48, [3] * 17, [1] * 40)


def taken(rung: Rung) -> set[str]:
    """List the components that a rung takes from the optimized side."""
    return {key for key, choice in rung.components.items() if choice == "optimized"}


@cache
def serve(name: str, before: str | None = None, backend: str | None = None) -> Run:
    """Serve all prompts, one more in every step, by an engine of a rung."""
    rung = rungs.find(name)
    engine = make_engine(
        model_config("hybrid"),
        backend or rung.backend,
        rungs.components(name, backend, before),
        max_tokens_per_step=23,
        num_blocks=7,
        snapshot_slots=2,
        **rungs.options(name),
    )
    result = Run()
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, greedy(10), request_id=f"r{index}")
        result.note(engine.step())
    return drain(engine, result)


def logprobs(run: Run, name: str) -> Tensor:
    """Stack a request's log-probabilities by position."""
    rows = run.logprobs[name]
    return torch.stack([rows[position] for position in sorted(rows)])


def assert_same_run(actual: Run, expected: Run) -> None:
    """Hold plans and tokens equal, and log-probabilities to the model's budget."""
    for mine, theirs in zip(actual.records, expected.records, strict=True):
        assert mine.plan == theirs.plan
        assert mine.stored_states == theirs.stored_states
    for name, output in expected.outputs.items():
        assert actual.outputs[name].token_ids == output.token_ids
        assert_budgeted("model", logprobs(actual, name), logprobs(expected, name))


def test_names_are_different_and_changes_are_told() -> None:
    """Each rung says in sentences what changes."""
    assert len(set(NAMES)) == len(NAMES)
    assert all(rung.change.endswith(".") for rung in RUNGS)


@pytest.mark.parametrize("rung", RUNGS, ids=NAMES)
def test_components_and_options_are_known(rung: Rung) -> None:
    """Keys are those of components, options those of engines."""
    assert set(rung.components) <= set(component_keys())
    for form in rung.before.values():
        assert form
        assert set(form) <= set(component_keys())
        assert all(":" in choice for choice in form.values())
    assert EngineConfig(**rung.options)


def test_every_component_is_taken_once() -> None:
    """One rung takes a component from the optimized side, and keeps it."""
    found = [key for rung in RUNGS for key in sorted(taken(rung))]
    assert sorted(found) == sorted(component_keys())


def test_interim_forms_are_replaced_later() -> None:
    """What a rung takes from elsewhere, a later one takes from the optimized side."""
    for index, rung in enumerate(RUNGS):
        later = {key for other in RUNGS[index + 1 :] for key in taken(other)}
        assert set(rung.components) - taken(rung) <= later


@pytest.mark.parametrize(("before", "after"), list(pairwise(NAMES)))
def test_each_rung_includes_the_one_before(before: str, after: str) -> None:
    """Nothing is given back: no component, no option."""
    lost = rungs.components(after, "optimized").items()
    assert {key for key, choice in lost if choice == "reference"} <= set(
        rungs.components(before, "optimized")
    )
    assert set(rungs.options(before)) <= set(rungs.options(after))


@pytest.mark.parametrize(("before", "after"), list(pairwise(NAMES)))
def test_each_rung_changes_something(before: str, after: str) -> None:
    """Two neighbours differ, in components or in options."""
    first, second = (
        (rungs.components(name, "optimized"), rungs.options(name))
        for name in (before, after)
    )
    assert first != second


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ends_are_the_two_sides(backend: str) -> None:
    """The first rung is all the reference's, the last all the optimized side's."""
    for name, side in zip((NAMES[0], NAMES[-1]), BACKENDS, strict=True):
        mixed = build_components(backend, rungs.components(name, backend))
        assert mixed == build_components(side)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_older_forms_stand_in_for_what_the_rung_has(name: str, form: str) -> None:
    """They replace components that are the optimized side's by then."""
    own = rungs.components(name, "optimized")
    older = rungs.find(name).before[form]
    assert not set(older) & set(own)
    assert rungs.components(name, "optimized", form) == {**own, **older}


def test_unknown_names_are_refused() -> None:
    """A misspelt rung is answered with the list of all; so is a lost form."""
    with pytest.raises(KeyError, match="paged attention"):
        rungs.components("paged atention")
    with pytest.raises(ConfigError, match="no_such_form"):
        build_components("reference", {"linear.linear": "benchmarks.no_such_form:x"})


@pytest.mark.parametrize("name", ON_CPU)
def test_each_rung_is_a_working_engine(name: str) -> None:
    """The same plans and tokens as the reference's, evictions and all."""
    assert_same_run(serve(name), serve(NAMES[0]))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_each_older_form_works_in_its_rung(name: str, form: str) -> None:
    """So it is with what a rung replaced."""
    assert_same_run(serve(name, form), serve(name))


@pytest.mark.parametrize("name", ["loops", "vectorized metadata", "grouped experts"])
def test_either_engine_runs_a_rung(name: str) -> None:
    """Components of both sides work in the optimized engine as well."""
    assert_same_run(serve(name, backend="optimized"), serve(name))


def test_the_run_stores_and_evicts() -> None:
    """The runs that are compared find, store and evict states and blocks."""
    plans: list[Any] = [record.plan for record in serve(NAMES[0]).records]
    for event in ("evicted_blocks", "evicted_states"):
        assert any(getattr(plan, event) for plan in plans), event
    assert any(record.stored_states for record in serve(NAMES[0]).records)
    outputs = serve(NAMES[0]).outputs.values()
    assert any(output.cache.num_skipped_tokens for output in outputs)
