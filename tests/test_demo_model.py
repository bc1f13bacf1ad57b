"""The packaged checkpoint is small, complete, and what its card says.

``test_transformers.py`` compares its log-probabilities with those of `transformers`.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.llm import DEMO_FOLDER
from lockstep.parameters import num_parameters

SCRIPTS = Path(__file__).resolve().parents[1] / "training" / "demo"
RECORD: dict[str, Any] = json.loads((DEMO_FOLDER / "training_run.json").read_text())
MEGABYTES = 12
BALANCE = "e_score_correction_bias"
SMALL = EngineConfig(max_requests=4, num_blocks=64)

#: Users' lines; a name before the first colon speaks in place of the default, and a
#: first line in brackets is the system message.
CONVERSATIONS = {
    "as it comes": ["Who's there?", "Long live the king!", "Farewell."],
    "a character": [
        "[You are Juliet.]",
        "ROMEO: Do you love me?",
        "ROMEO: Then speak!",
    ],
    "untidy": [" What is\nthe matter? \n", "— «Où?» \N{GRINNING FACE}", ""],
}


@cache
def demo() -> LLM:
    """The model, with little memory; tests leave nothing in flight."""
    return LLM("demo", device="cpu", config=SMALL, verbose=False)


def greedy(max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
    """Take the likeliest token each time."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def message(line: str) -> dict[str, str]:
    """Turn a line of a conversation into a message."""
    if line.startswith("["):
        return {"role": "system", "content": line.strip("[]")}
    name, colon, words = line.partition(": ")
    if colon:
        return {"role": "user", "name": name, "content": words}
    return {"role": "user", "content": line}


def test_the_folder_is_small() -> None:
    """A package can hold it."""
    size = sum(path.stat().st_size for path in DEMO_FOLDER.iterdir())
    assert size < MEGABYTES * 1e6


def test_every_kind_of_layer_and_short_blocks() -> None:
    """One layer of each kind at least; blocks that short prompts fill."""
    model = demo().model_config
    assert set(model.layer_pattern) == set("M*-E")
    assert model.mamba is not None
    assert model.mamba.scan_chunk_size == demo().sizes.block_size == 16


@given(text=st.text(max_size=80))
def test_any_text_comes_back(text: str) -> None:
    """Bytes spell what no token does; nothing is normalized."""
    ids = demo().tokenizer.encode(text, add_special_tokens=False)
    assert demo().tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_next_turn_extends_ids_and_reply(name: str) -> None:
    """The model's own replies, cut off anywhere: only the end token is added."""
    tokenizer = demo().tokenizer
    end = demo().model_config.eos_token_ids[0]
    messages: list[dict[str, str]] = []
    for line in CONVERSATIONS[name]:
        messages.append(message(line))
        if messages[-1]["role"] == "system":
            continue
        prompt = tokenizer.apply_chat_template(messages)
        (output,) = demo().generate(prompt, greedy(40))
        reply = [token for token in output.token_ids if token != end]
        assert reply, "nothing to cut off"
        for length in range(len(reply) + 1):
            said = {"role": "assistant", "content": tokenizer.decode(reply[:length])}
            longer = tokenizer.apply_chat_template([*messages, said, message("And?")])
            expected = [*prompt, *reply[:length], end]
            assert longer[: len(expected)] == expected
        messages.append({"role": "assistant", "content": output.text})


def recorded_prompts() -> list[tuple[list[int], str]]:
    """List the openings of scenes among the recorded greedy texts, with the text."""
    found: list[tuple[list[int], str]] = []
    for text in RECORD["evaluation"]["greedy"]:
        opening, mark, reply = text.rpartition("<speech>")
        if mark:
            ids = demo().tokenizer.encode(opening + mark, add_special_tokens=False)
            found.append((ids, reply))
    return found


def test_the_end_token_ends_a_reply_and_replies_are_those_recorded() -> None:
    """Greedy replies equal what `transformers` gave when the card was made."""
    prompts, replies = zip(*recorded_prompts(), strict=True)
    outputs = demo().generate(list(prompts), greedy(80))
    end = demo().model_config.eos_token_ids[0]
    for output, reply in zip(outputs, replies, strict=True):
        assert output.finish_reason == "stop"
        assert output.token_ids.index(end) == len(output.token_ids) - 1
        assert output.text + "</s>" == reply
    ended = outputs[0].token_ids
    (longer,) = demo().generate(prompts[0], greedy(len(ended) + 2, ignore_eos=True))
    assert longer.finish_reason == "length"
    assert longer.token_ids[: len(ended)] == ended


def test_greedy_output_is_deterministic() -> None:
    """The same from a fresh model, from a used one, and from its cache."""
    prompts = ["The next morning", "It was", "\N{EM DASH}"]
    fresh = LLM("demo", device="cpu", config=SMALL, verbose=False)
    found = [llm.generate(prompts, greedy(12)) for llm in (fresh, demo(), fresh)]
    ids = [[output.token_ids for output in outputs] for outputs in found]
    assert ids[0] == ids[1] == ids[2]


def test_card_and_notice_are_those_of_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rendering them again changes nothing."""
    monkeypatch.syspath_prepend(SCRIPTS)
    rendered = importlib.import_module("card").render(DEMO_FOLDER)
    assert set(rendered) == {"README.md", "NOTICE"}
    for name, text in rendered.items():
        assert (DEMO_FOLDER / name).read_text(encoding="utf-8") == text
    parameters = f"{RECORD['parameters']:,}"
    assert parameters in rendered["NOTICE"]
    assert parameters in rendered["README.md"]
    score = RECORD["evaluation"]["bits_per_byte"]
    assert f"{score:.4f} bits per byte" in rendered["README.md"]


def test_the_record_is_that_of_the_weights() -> None:
    """Parameters are counted in the file; the run kept is the best of all made."""
    with safe_open(DEMO_FOLDER / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    assert sum(map(prod, shapes.values())) == num_parameters(demo().model_config)
    # `transformers` does not count what no gradient trains.
    trained = [shape for name, shape in shapes.items() if BALANCE not in name]
    assert sum(map(prod, trained)) == RECORD["parameters"]
    runs = [RECORD, *RECORD["alternatives"]]
    scores = [min(point["held_out"] for point in run["curve"]) for run in runs]
    assert min(scores) == scores[0]
    # Scored again from the saved file, on another device.
    assert RECORD["evaluation"]["bits_per_byte"] == pytest.approx(scores[0], abs=1e-3)
