"""Bugs of text that were reported against real engines, each tried as a kind here.

=====================================================  =================================
test                                                   reported as
=====================================================  =================================
test_a_stop_string_over_several_tokens_is_never_shown  vllm#3574, vllm#2577, vllm#3672
test_a_stop_string_that_does_not_come_is_shown         vllm#3574
test_emoji_over_several_tokens                         vllm#45636, vllm#48853,
                                                       mlx-vlm#1771, exo#1691
test_a_prompt_that_ends_within_a_character             vllm#45636
test_a_text_that_ends_within_a_character               vllm#48853
=====================================================  =================================
"""

from __future__ import annotations

import pytest

from lockstep.stream import StreamDelta
from lockstep.tokenizer import REPLACEMENT
from tests.scenarios.common import assert_nothing_held
from tests.scripted import scripted

MODULE = "engine"

SPEECH = "To be, or not to be, that is the question."
GRIN, WAVE = "\N{GRINNING FACE}", "\N{WATER WAVE}"


def texts(deltas: list[StreamDelta]) -> list[str]:
    """List what was shown after each delta."""
    return ["".join(each.text for each in deltas[: n + 1]) for n in range(len(deltas))]


@pytest.mark.parametrize("stop", ["not to be, that", "or no", "t is", "?!", "question"])
@pytest.mark.parametrize("others", [[], ["not to do", "that is all"]])
def test_a_stop_string_over_several_tokens_is_never_shown(
    side: str, stop: str, others: list[str]
) -> None:
    """Nor any beginning of it that could still become one; nothing follows it."""
    llm, sampling = scripted(SPEECH, side, stop=[stop, *others])
    deltas = list(llm.stream([1, 2, 3], sampling))
    output = deltas[-1].output
    assert output is not None
    expected, found, _ = SPEECH.partition(stop)
    assert output.finish_reason == ("stop" if found else "length")
    shown = texts(deltas)
    assert shown[-1] == output.text == expected
    for text, delta in zip(shown, deltas, strict=True):
        starts = [each[:n] for each in (stop, *others) for n in range(1, len(each) + 1)]
        assert expected.startswith(text)
        assert delta.output is not None or not text.endswith(tuple(starts))
    if found:
        assert stop in llm.tokenizer.decode(output.token_ids)
        assert stop not in llm.tokenizer.decode(output.token_ids[:-1])
    assert_nothing_held(llm.engine)


def test_a_stop_string_that_does_not_come_is_shown(side: str) -> None:
    """What was held back for it comes with the next token, or with the last."""
    llm, sampling = scripted(SPEECH, side, stop=["not to bed", "question.."])
    deltas = list(llm.stream([1, 2, 3], sampling))
    assert texts(deltas)[-1] == SPEECH
    assert "to be, or not".casefold() not in [each.casefold() for each in texts(deltas)]
    assert "question." in deltas[-1].text


def test_emoji_over_several_tokens(side: str) -> None:
    """A character comes whole, at its last token; no replacement stands in for it."""
    said = f"{GRIN}a{WAVE}{GRIN} {WAVE}"
    llm, sampling = scripted(said, side)
    deltas = list(llm.stream([1, 2, 3], sampling))
    assert len(deltas) > len(said)
    for text in texts(deltas):
        assert said.startswith(text)
        assert REPLACEMENT not in text
    assert deltas[-1].output is not None
    assert texts(deltas)[-1] == deltas[-1].output.text == said


def test_a_prompt_that_ends_within_a_character(side: str) -> None:
    """No byte of the prompt is shown; what was generated is decoded alone."""
    tokenizer = scripted("", side, max_tokens=1)[0].tokenizer
    ids = tokenizer.encode(f"so{GRIN} it is", add_special_tokens=False)
    whole = [n for n in range(len(ids)) if GRIN in tokenizer.decode(ids[:n])][0]
    for cut in range(1, whole):
        llm, sampling = scripted(ids[cut:], side)
        deltas = list(llm.stream(ids[:cut], sampling))
        text = texts(deltas)[-1]
        assert text == tokenizer.decode(ids[cut:])
        assert text.lstrip(REPLACEMENT) in (f"so{GRIN} it is"[-len(text) :], " it is")
        (again,) = llm.generate(ids[:cut], sampling)
        assert again.text == text


def test_a_text_that_ends_within_a_character(side: str) -> None:
    """Only the last delta may hold a replacement."""
    llm, _ = scripted("", side, max_tokens=1)
    ids = llm.tokenizer.encode(f"so{GRIN}", add_special_tokens=False)[:-1]
    llm, sampling = scripted(ids, side)
    deltas = list(llm.stream([1, 2, 3], sampling))
    assert [REPLACEMENT in delta.text for delta in deltas[:-1]].count(True) == 0
    assert texts(deltas)[-1] == llm.tokenizer.decode(ids)
    assert REPLACEMENT in deltas[-1].text
