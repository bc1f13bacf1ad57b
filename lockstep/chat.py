"""Conversations whose every turn reuses the ones before."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from lockstep.request import FinishReason, RequestOutput, SamplingParams
from lockstep.stream import StreamDelta

if TYPE_CHECKING:
    from lockstep.llm import LLM

#: Stands for the latest reply in a rendered conversation; no text has it.
_MARK = "\0"


class Chat:
    """A conversation, kept as token ids.

    Tokenizing the text of earlier turns again could give other ids than those computed
    and generated, and the cache knows only these. So a turn's prompt is the ids so far,
    then what the chat template writes between the latest reply and the next one.

    Args:
        llm: The model; its tokenizer needs a chat template.
        system: A system message to begin with; none if empty.
        sampling_params: How replies are drawn unless a turn says otherwise.

    Attributes:
        messages: The conversation in words.
        token_ids: Its ids, up to the end of the latest reply's text.
    """

    def __init__(
        self,
        llm: LLM,
        system: str = "",
        sampling_params: SamplingParams | None = None,
    ) -> None:
        """Start a conversation."""
        self.llm, self.system, self.sampling_params = llm, system, sampling_params
        self.messages: list[Mapping[str, str]] = []
        self.token_ids: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message; what is cached stays cached."""
        first = {"role": "system", "content": self.system}
        self.messages = [first] if self.system else []
        self.token_ids = []

    def send(
        self,
        message: str | Mapping[str, str],
        sampling_params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Say something and return the reply; arguments and errors are `stream`'s."""
        *_, last = self.stream(message, sampling_params)
        assert last.output is not None
        return last.output

    def stream(
        self,
        message: str | Mapping[str, str],
        sampling_params: SamplingParams | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """Say something and give the reply as it comes.

        A turn that is broken off, or fails, is no part of the conversation; nor is one
        during which another ended, or the conversation was reset.

        Args:
            message: The user's words, or a message with ``role`` and ``content``.
            sampling_params: How the reply is drawn; the conversation's unless set.

        Raises:
            RequestError: No chat template, or a conversation that is too long.
        """
        if isinstance(message, str):
            message = {"role": "user", "content": message}
        prompt = self._prompt([*self.messages, message])
        deltas = self.llm.stream(prompt, sampling_params or self.sampling_params)
        return self._follow(self.messages, message, deltas)

    def _follow(
        self,
        before: list[Mapping[str, str]],
        message: Mapping[str, str],
        deltas: Generator[StreamDelta, None, None],
    ) -> Generator[StreamDelta, None, None]:
        """Pass a reply on, and add the turn to the conversation when it is whole."""
        whole = FinishReason.STOP, FinishReason.LENGTH
        with closing(deltas):
            for delta in deltas:
                output, is_current = delta.output, self.messages is before
                if is_current and output and output.finish_reason in whole:
                    reply = {"role": "assistant", "content": output.text}
                    self.messages = [*before, message, reply]
                    self.token_ids = self._spoken(output)
                yield delta

    def _prompt(self, messages: list[Mapping[str, str]]) -> list[int]:
        """Add the latest message to the ids so far."""
        tokenizer = self.llm.tokenizer
        if self.token_ids:
            *before, reply, new = messages
            marked = {**reply, "content": _MARK}
            parts = tokenizer.render([*before, marked, new]).split(_MARK)
            if len(parts) == 2:
                rest = tokenizer.encode(parts[1], add_special_tokens=False)
                return self.token_ids + rest
        return tokenizer.apply_chat_template(messages)

    def _spoken(self, output: RequestOutput) -> list[int]:
        """Leave out what follows the reply's text: end token and stop string.

        The template writes the end of a turn itself.
        """
        token_ids = list(output.token_ids)
        while token_ids:
            shorter = self.llm.tokenizer.decode(token_ids[:-1])
            if not shorter.startswith(output.text):
                break
            token_ids.pop()
        return output.prompt_token_ids + token_ids
