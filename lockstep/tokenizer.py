"""Text to token ids and back, as the checkpoint's own tokenizer does it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.backend.decode(
            list(token_ids),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: Whether the assistant's turn is begun.

        Raises:
            RequestError: A tokenizer without a chat template, or messages that it does
                not take.
        """
        try:
            text = self.backend.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            raise RequestError(f"these messages cannot be used: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def is_open(self, token_id: int) -> bool:
        """Tell whether the next token may change what this one stands for.

        So may it where a token is one byte of a character; special tokens leave no
        trace between two such.
        """
        token = self.backend.convert_ids_to_tokens(token_id) or ""
        is_byte = _BYTE_TOKEN.fullmatch(token) is not None
        return is_byte or token_id in self.backend.all_special_ids


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces join to the whole text.

    A character may be spread over several tokens, so text is held back while its end
    could still change. Only the latest tokens are decoded each time; settled ones stay
    among them, since some tokenizers treat the first token of a text in their own way.

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
