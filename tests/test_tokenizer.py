"""Text to ids and back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from lockstep.errors import CheckpointError, RequestError
from lockstep.llm import DEMO_FOLDER
from lockstep.tokenizer import Tokenizer

SCENE = [
    {"role": "user", "content": "Who's there?"},
    {"role": "assistant", "content": "Nay, answer me."},
    {"role": "user", "content": "Long live the king!"},
]


@cache
def demo() -> Tokenizer:
    """The demo model's tokenizer: byte-level pieces."""
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    assert tokenizer is not None
    return tokenizer


def test_a_beginning_token_is_added_as_the_tokenizer_says() -> None:
    """The demo's tokenizer begins a text; it is not decoded."""
    ids = demo().encode("To be")
    assert ids[0] == demo().backend.bos_token_id
    assert ids[1:] == demo().encode("To be", add_special_tokens=False)
    assert demo().decode(ids) == "To be"


def test_chat_template() -> None:
    """A longer conversation begins with the shorter one's ids."""
    whole = demo().apply_chat_template(SCENE)
    before = demo().apply_chat_template(SCENE[:2], add_generation_prompt=False)
    assert whole[: len(before)] == before
    assert whole.count(demo().backend.bos_token_id) == 1
    assert "Long live the king!" in demo().decode(whole)


def test_no_chat_template() -> None:
    """A tokenizer without a template cannot take messages, and says so."""
    raw = RawTokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(RequestError, match="chat_template"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw)).apply_chat_template(
            SCENE
        )


def test_folders(tmp_path: Path) -> None:
    """A folder without a tokenizer has none; a damaged one is an error."""
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "none"}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
