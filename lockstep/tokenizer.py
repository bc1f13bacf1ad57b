"""Text to token ids and back, as the checkpoint's own tokenizer does it.

Back also piece by piece: `IncrementalDecoder` holds back what is not yet a whole
character, `StopFinder` what may yet become a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, RequestError

#: A folder has a tokenizer if it holds one of these.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

#: What a decoder writes for bytes that are not (yet) a character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: Tokens that an incremental decoder keeps.
_WINDOW = 32

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: A tokenizer of the ``transformers`` library.
    """

    def __init__(self, backend: Any) -> None:
        """Wrap a tokenizer."""
        self.backend = backend

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Load a folder's tokenizer; None where it has none.

        Raises:
            CheckpointError: Files that are damaged.
        """
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except Exception as error:
            raise CheckpointError(
                f"the tokenizer in {folder} cannot be read: {error}"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with a beginning token if the tokenizer adds one.

        Args:
            text: Any text.
            add_special_tokens: False for text that already holds its special tokens,
                such as a filled-in chat template.

        Raises:
            RequestError: Text with half of a surrogate pair, which no file can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"this text is not valid Unicode: {error}") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.backend.decode(
            list(token_ids),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the chat template writes it, marks and all.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: Whether the assistant's turn is begun.

        Raises:
            RequestError: A tokenizer without a chat template, or messages that it does
                not take.
        """
        for message in messages:
            if not _is_message(message):
                raise RequestError(
                    f"these messages cannot be used: {message} lacks role or content"
                )
        try:
            return self.backend.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            raise RequestError(f"these messages cannot be used: {error}") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation; arguments and errors are `render`'s."""
        text = self.render(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def is_open(self, token_id: int) -> bool:
        """Tell whether the next token may change what this one stands for.

        So may it where a token is one byte of a character; special tokens leave no
        trace between two such.
        """
        if token_id in self._special_ids:
            return True
        token = self.backend.convert_ids_to_tokens(token_id) or ""
        return _BYTE_TOKEN.fullmatch(token) is not None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.backend.all_special_ids)


def _is_message(message: Any) -> bool:
    """Tell what a template may be given from what it might pass over."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return message.get("content", message.get("tool_calls")) is not None


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces join to the whole text.

    A character may be spread over several tokens, so text is held back while its end
    could still change. Only the latest tokens are decoded each time; settled ones stay
    among them, since some tokenizers treat the first token of a text in their own way.
    The tokens of a prompt take no part: what begins within a character begins with the
    replacement for its missing bytes, and with nothing of the prompt's.

    Args:
        tokenizer: Whose tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with an empty text."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Take the next tokens and return the text that they settle.

        Args:
            token_ids: Next tokens; may be empty.
            final: Whether no more will come, so that nothing is held back.
        """
        self._tokens.extend(token_ids)
        text = self._tokenizer.decode(self._tokens)
        settled = text if final else self._settled(text)
        delta = settled[len(self._shown) :]
        self._shown += delta
        if self._shown == text and len(self._tokens) > 2 * _WINDOW:
            self._forget()
        return delta

    def _settled(self, text: str) -> str:
        """Cut off what later tokens could change."""
        count = len(self._tokens)
        while count and self._tokenizer.is_open(self._tokens[count - 1]):
            count -= 1
        if count < len(self._tokens):
            text = self._tokenizer.decode(self._tokens[:count])
        return text.rstrip(REPLACEMENT)

    def _forget(self) -> None:
        """Drop old tokens, unless the rest alone would decode to nothing."""
        kept = self._tokens[-_WINDOW:]
        if text := self._tokenizer.decode(kept):
            self._tokens, self._shown = kept, text


class StopFinder:
    """Ends a text before the first stop string, however the text is cut into pieces.

    The first is the one that is complete first, and of those complete at once the
    longest. What might yet become a stop string is held back.

    Args:
        stop: Stop strings; none may be empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Start with an empty text."""
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, text: str, final: bool = False) -> str:
        """Take the next piece and return what of the text may be shown.

        Args:
            text: Next piece; may be empty. Once ``found``, no more is shown.
            final: Whether no more will come, so that nothing is held back.
        """
        if self.found:
            return ""
        text = self._held + text
        places = [(text.find(stop), len(stop)) for stop in self._stop]
        ends = [(start + length, start) for start, length in places if start >= 0]
        self.found = bool(ends)
        if self.found:
            cut = min(ends)[1]
        else:
            cut = len(text) if final else self._first_doubt(text)
            self._held = text[cut:]
        return text[:cut]

    def _first_doubt(self, text: str) -> int:
        """Return where the longest end of a text begins that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        first = max(0, len(text) - longest)
        for start in range(first, len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
