"""Text to token ids and back, as the checkpoint's own tokenizer does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, RequestError

#: A folder has a tokenizer if it holds one of these.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


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
