"""Conversations kept as token ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lockstep import LLM, Chat, SamplingParams
from lockstep.blocks import align_down
from lockstep.errors import RequestError

LINES = ("My lord, what news?", "Indeed?", "And what says the king to it?")


@cache
def demo() -> LLM:
    """The packaged model, with a block and a scan chunk of 16 tokens."""
    return LLM("demo", device="cpu", verbose=False)


def replies(chat: Chat, **options: Any) -> list[Any]:
    """Say all lines."""
    settings: dict[str, Any] = {"temperature": 0.7, "max_tokens": 20, "seed": 3}
    sampling = SamplingParams(**(settings | options))
    return [chat.send(line, sampling) for line in LINES]


@pytest.mark.parametrize("max_tokens", [1, 20, 200])
def test_a_turn_reuses_all_turns_before(max_tokens: int) -> None:
    """All but a part of a block, whether the reply was cut or ended itself."""
    llm = demo()
    llm.engine.reset()
    outputs = replies(Chat(llm), max_tokens=max_tokens)
    for before, after in zip(outputs, outputs[1:], strict=False):
        spoken = before.prompt_token_ids + before.token_ids
        assert after.prompt_token_ids[: len(spoken)] == spoken
        assert after.cache.num_skipped_tokens == align_down(len(spoken) - 1, 16)
        assert after.cache.differs_from is None
    (end,) = llm.model_config.eos_token_ids
    assert outputs[-1].prompt_token_ids.count(end) == 2 * len(LINES) - 1


def test_the_prompt_is_what_the_template_writes() -> None:
    """In words, the ids are the rendered conversation."""
    llm = demo()
    chat = Chat(llm, system="You are Juliet.")
    *_, last = replies(chat)
    rendered = llm.tokenizer.render(chat.messages[:-1])
    assert llm.tokenizer.backend.decode(last.prompt_token_ids) == rendered
    assert "<speaker>JULIET" in rendered
    assert chat.messages[-1] == {"role": "assistant", "content": last.text}


def test_a_stop_string_is_no_part_of_the_conversation() -> None:
    """The next prompt goes on from the text, with the turn's end in its place."""
    llm = demo()
    chat = Chat(llm)
    sampling = SamplingParams(temperature=0.7, max_tokens=20, seed=3, stop=",")
    first = chat.send(LINES[0], sampling)
    assert first.finish_reason == "stop"
    second = chat.send(LINES[1], sampling)
    spoken = llm.tokenizer.backend.decode(second.prompt_token_ids)
    assert f"<speech>{first.text}</s>" in spoken


def test_text_tokenized_again_may_differ() -> None:
    """Then less is reused, and the report says from which token on."""
    llm = demo()
    llm.engine.reset()
    chat = Chat(llm)
    replies(chat, stop="e ", max_tokens=200)
    assert "hav" in chat.messages[1]["content"].split()
    messages = [*chat.messages, {"role": "user", "content": "What?"}]
    (again,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=1))
    place = again.cache.differs_from
    assert place is not None
    first = chat.token_ids
    assert first[:place] == again.prompt_token_ids[:place]
    assert first[place] != again.prompt_token_ids[place]
    assert again.cache.num_skipped_tokens <= place


def test_a_turn_broken_off_is_forgotten() -> None:
    """The conversation stands as before, and nothing stays in flight."""
    llm = demo()
    chat = Chat(llm, sampling_params=SamplingParams(temperature=0.0, max_tokens=8))
    chat.send(LINES[0])
    before = list(chat.messages), list(chat.token_ids)
    deltas = chat.stream(LINES[1])
    next(deltas)
    deltas.close()
    assert (chat.messages, chat.token_ids) == before
    assert not llm.engine.has_work
    deltas = chat.stream(LINES[1])
    llm.abort(next(deltas).request_id)
    *_, last = deltas
    assert last.output is not None
    assert last.output.finish_reason == "abort"
    assert (chat.messages, chat.token_ids) == before


def test_reset() -> None:
    """Only the system message stays; the first turn then is cached."""
    chat = Chat(demo(), "Juliet", SamplingParams(temperature=0.0, max_tokens=4))
    first = chat.send(LINES[0])
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Juliet"}]
    again = chat.send(LINES[0])
    assert again.token_ids == first.token_ids
    assert again.cache.num_skipped_tokens > 0


def test_a_conversation_that_is_too_long() -> None:
    """It is refused before anything starts, and may start over."""
    chat = Chat(demo(), sampling_params=SamplingParams(max_tokens=4000))
    with pytest.raises(RequestError, match="max_length is 4096"):
        chat.stream("words " * 200)
    assert chat.messages == []


def test_a_template_that_rewrites_earlier_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the latest reply is not found again, all of the text is tokenized."""
    llm = demo()
    chat = Chat(llm, sampling_params=SamplingParams(temperature=0.0, max_tokens=4))
    chat.send(LINES[0])
    monkeypatch.setattr(
        type(llm.tokenizer), "render", lambda *_, **__: "<s>no reply in here"
    )
    output = chat.send(LINES[1])
    expected = llm.tokenizer.encode("<s>no reply in here", add_special_tokens=False)
    assert output.prompt_token_ids == expected


def test_of_two_turns_at_once_the_first_to_end_counts() -> None:
    """The other one heard nothing of it."""
    chat = Chat(demo())
    long, short = (
        chat.stream(line, SamplingParams(max_tokens=count, ignore_eos=True, seed=1))
        for line, count in zip(LINES, (12, 3), strict=False)
    )
    next(long)
    *_, last = short
    assert last.output is not None
    assert list(long)[-1].output is not None
    assert [message["content"] for message in chat.messages] == [
        LINES[1],
        last.output.text,
    ]
    prompt = last.output.prompt_token_ids + last.output.token_ids
    assert chat.token_ids == prompt[: len(chat.token_ids)]


def test_a_reset_in_the_midst_of_a_turn_stays() -> None:
    """The turn is no part of the new conversation."""
    chat = Chat(demo(), system="You are Juliet.")
    turn = chat.stream(LINES[0], SamplingParams(max_tokens=4, ignore_eos=True))
    next(turn)
    chat.reset()
    assert list(turn)[-1].output is not None
    assert [message["role"] for message in chat.messages] == ["system"]
    assert chat.token_ids == []


@pytest.mark.parametrize("message", [5, None, {"content": "x"}, {"role": "user"}])
def test_what_is_no_message(message: Any) -> None:
    """It is refused, and is no part of the conversation."""
    chat = Chat(demo())
    with pytest.raises(RequestError, match="message"):
        chat.send(message)
    assert chat.messages == []
