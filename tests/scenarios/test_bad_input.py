"""Bad input: one clear error each, at the door, and nobody in flight is disturbed."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.config import EngineConfig, engine_options
from lockstep.errors import ConfigError, RequestError
from lockstep.request import SamplingParams
from tests.engines import Run, greedy, make_engine
from tests.scenarios.common import (
    assert_nothing_held,
    drain_equal,
    text,
    tiny,
)

MODULE = "engine"

MODEL = tiny("M*", eos_token_ids=(60,))
FOUR = greedy(4)


@dataclass(frozen=True)
class Bad:
    """A request that must be refused.

    Attributes:
        prompt: Its prompt.
        options: Its sampling parameters.
        message: Words of the error: the value, then the limit.
        request_id: Its name.
    """

    prompt: list[Any]
    message: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    request_id: str | None = None


TEN = text(10)

#: What only an engine can judge: sizes are 64 tokens at most, 3 blocks of 16, and a
#: vocabulary of 61.
REQUESTS: dict[str, Bad] = {
    "empty prompt": Bad([], "the prompt is empty; it must have at least one"),
    "token beyond the vocabulary": Bad([1, 61], r"\[61\] .* \[0, 61\)"),
    "negative token": Bad([-1, 3], r"\[-1\] are not integers in \[0, 61\)"),
    "token that is no integer": Bad([1.0, 3], r"\[1.0\] are not integers"),
    "token that is a truth value": Bad([True, 2], r"\[True\] are not integers"),
    "token that is text": Bad(["a", 2], r"\['a'\] are not integers"),
    "too long a prompt": Bad(text(64), "64 tokens .*=1 come to 65; max_length is 64"),
    "too much to come": Bad(
        TEN, "10 tokens .*=55 come to 65; max_length is 64", {"max_tokens": 55}
    ),
    "more than the pool holds": Bad(
        text(40), "49 tokens need 4 blocks of 16; the pool has 3", {"max_tokens": 10}
    ),
    "a name in flight": Bad(TEN, "'other' is still in flight", request_id="other"),
    "more logprobs than tokens": Bad(
        TEN, "logprobs is 62; the vocabulary has 61", {"logprobs": 62}
    ),
    "more prompt_logprobs than tokens": Bad(
        TEN, "prompt_logprobs is 62; the vocabulary has 61", {"prompt_logprobs": 62}
    ),
    "prompt_logprobs from beyond the prompt": Bad(
        TEN,
        "prompt_logprobs_from is 10; the prompt has 10 tokens",
        {"prompt_logprobs": 1, "prompt_logprobs_from": 10},
    ),
    "a stop token beyond the vocabulary": Bad(
        TEN, r"stop_token_ids \[61\] are not in \[0, 61\)", {"stop_token_ids": [3, 61]}
    ),
    "nothing but end tokens at first": Bad(
        TEN,
        "min_tokens is 1, but all 61 tokens of the vocabulary end the request",
        {
            "min_tokens": 1,
            "max_tokens": 2,
            "ignore_eos": False,
            "stop_token_ids": list(range(60)),
        },
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_bad_request_is_refused_and_disturbs_nobody(
    side: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has value and limit; a request beside equals its lone run."""
    bad = REQUESTS[case]
    engine = make_engine(MODEL, side, max_length=64, num_blocks=3)
    engine.add(TEN, FOUR, "other")
    run = Run()
    run.note(engine.step())
    before = engine.export_state()
    sampling = greedy(**({"max_tokens": 1} | bad.options))
    # Without the type checks that only tests have.
    for method in ("add", "check"):
        plain = inspect.unwrap(getattr(type(engine), method))
        monkeypatch.setattr(type(engine), method, plain)
    with pytest.raises(RequestError, match=bad.message) as caught:
        engine.add(bad.prompt, sampling, bad.request_id)
    assert "\n" not in str(caught.value)
    after = engine.export_state()
    assert after.arrivals == before.arrivals
    assert (after.blocks, after.slots) == (before.blocks, before.slots)
    drain_equal(engine, FOUR, run)
    assert list(run.outputs) == ["other"]
    assert_nothing_held(engine)


#: What can be judged without an engine: name, value, and what it must be.
PARAMETERS: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, r"in \[0, "),
    ("temperature", 3.5e38, "finite"),
    ("temperature", 10**400, "finite"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", "hot", "a number"),
    ("temperature", True, "a number"),
    ("temperature", None, "a number"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -1, "at least 1"),
    ("max_tokens", 2.5, "an integer"),
    ("max_tokens", None, "an integer"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 1.0, "an integer"),
    ("min_tokens", None, "an integer"),
    ("min_tokens", 17, "max_tokens is only 16"),
    ("top_k", -1, "at least 0"),
    ("top_k", 2.0, "an integer"),
    ("top_k", True, "an integer"),
    ("top_k", 2**63, r"in \[0, 2\*\*63\)"),
    ("top_p", 0.0, "more"),
    ("top_p", -0.1, r"in \[0, 1\]"),
    ("top_p", 1.1, r"in \[0, 1\]"),
    ("top_p", math.nan, "finite"),
    ("top_p", "0.9", "a number"),
    ("top_p", None, "a number"),
    ("min_p", -0.1, r"in \[0, 1\]"),
    ("min_p", 1.5, r"in \[0, 1\]"),
    ("min_p", math.inf, "finite"),
    ("min_p", False, "a number"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, r"in \[0, 2\*\*63\)"),
    ("seed", 1.5, "an integer"),
    ("ignore_eos", 1, "True or False"),
    ("ignore_eos", None, "True or False"),
    ("stop_token_ids", 3, "a list"),
    ("stop_token_ids", "ab", "a list"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", [1.0], "an integer"),
    ("stop_token_ids", [True], "an integer"),
    ("stop", [""], "a character"),
    ("stop", "", "a character"),
    ("stop", ["a", 3], "a text"),
    ("stop", 3, "a list"),
    ("logprobs", -1, "at least 0"),
    ("logprobs", True, "an integer"),
    ("prompt_logprobs", -1, "at least 0"),
    ("prompt_logprobs", 1.0, "an integer"),
    ("prompt_logprobs_from", -1, "at least 0"),
    ("prompt_logprobs_from", None, "an integer"),
    ("prompt_logprobs_from", 3, "prompt_logprobs is not set"),
]


@pytest.mark.parametrize(("name", "value", "message"), PARAMETERS)
def test_a_bad_parameter_is_refused(name: str, value: Any, message: str) -> None:
    """The message begins with the name, has the value, and says what may be."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"^{name} (is|has) .*{message}") as caught:
        SamplingParams(**options)
    alone = value[-1] if isinstance(value, list) and value[-1] != "" else value
    assert alone in ("", [""]) or str(alone) in str(caught.value)


def test_every_parameter_has_its_refusals() -> None:
    """The table leaves no field out."""
    fields = set(SamplingParams.__dataclass_fields__)
    assert {name for name, _, _ in PARAMETERS} == fields


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "top_p": 0.9},
        {"temperature": 0.0, "top_k": 3, "min_p": 0.5, "seed": 1},
        {"temperature": 1, "top_p": 1, "min_p": 0, "top_k": 0},
        {"min_tokens": 16},
        {"stop": "\n"},
        {"stop": ["a", "b"], "stop_token_ids": [1, 2]},
        {"prompt_logprobs": 0, "prompt_logprobs_from": 5, "logprobs": 0},
    ],
)
def test_what_is_allowed(options: dict[str, Any]) -> None:
    """Whole numbers stand for real ones, and one stop string for a list of one."""
    params = SamplingParams(**options)
    assert isinstance(params.stop, tuple) and hash(params) == hash(params)
    assert params == SamplingParams(**options)


@pytest.mark.parametrize("name", ["memory_fraction", "snapshot_fraction"])
def test_a_fraction_that_is_no_number_is_refused(name: str) -> None:
    """An option of the wrong type is named, not compared."""
    with pytest.raises(ConfigError, match=f"{name} is 'half'; it must be a number"):
        engine_options(EngineConfig(), {name: "half"})
