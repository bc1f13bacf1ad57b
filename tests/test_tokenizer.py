"""Text to ids and back, whole and piece by piece."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from lockstep.errors import CheckpointError, RequestError
from lockstep.llm import DEMO_FOLDER
from lockstep.tokenizer import (
    REPLACEMENT,
    IncrementalDecoder,
    StopFinder,
    Tokenizer,
)

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


@cache
def byte_fallback() -> Tokenizer:
    """A tokenizer of words that spells all else in byte tokens.

    Its decoder drops the space before the first word, and turns a run of byte tokens
    that is no text into replacement characters, all of it.
    """
    pieces = ["<unk>", "▁", "▁a", "▁the", "b", "é"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))


TOKENIZERS = {"byte level": (demo, 2048), "byte fallback": (byte_fallback, 262)}


def pieces_of(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Decode ids in runs of the given sizes, round and round."""
    decoder = IncrementalDecoder(tokenizer)
    pieces: list[str] = []
    start = turn = 0
    while start < len(ids):
        end = start + sizes[turn % len(sizes)]
        pieces.append(decoder.push(ids[start:end]))
        start, turn = end, turn + 1
    return [*pieces, decoder.push([], final=True)]


#: Examples of what takes long; most of these are quick, so they try more.
EXAMPLES = settings().max_examples
RUNS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=5 * EXAMPLES)
@given(text=st.text(max_size=80), sizes=RUNS)
def test_pieces_of_any_text_join(text: str, sizes: list[int]) -> None:
    """Any Unicode text, in any split, comes out whole and without half characters."""
    ids = demo().encode(text, add_special_tokens=False)
    pieces = pieces_of(demo(), ids, sizes)
    assert "".join(pieces) == demo().decode(ids)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), sizes=RUNS)
def test_pieces_of_any_tokens_join(
    name: str, data: st.DataObject, sizes: list[int]
) -> None:
    """Any tokens, also those that spell no text, join to the whole decoding."""
    make, vocab = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=200))
    assert "".join(pieces_of(make(), ids, sizes)) == make().decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_texts_join(name: str) -> None:
    """Forgetting earlier tokens loses nothing."""
    make, vocab = TOKENIZERS[name]
    ids = [(7 * index * index + index) % vocab for index in range(1500)]
    assert "".join(pieces_of(make(), ids, [1])) == make().decode(ids)


def test_characters_are_held_back_until_whole() -> None:
    """A character of four bytes comes out at once, with its last byte."""
    ids = byte_fallback().backend.convert_tokens_to_ids(
        ["b", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"]
    )
    pieces = pieces_of(byte_fallback(), ids, [1])
    assert pieces == ["b", "", "", "", "", "\N{GRINNING FACE}b", ""]


def test_unfinished_bytes_are_shown_at_the_end() -> None:
    """Nothing is lost when a text ends within a character."""
    ids = demo().encode("é", add_special_tokens=False)[:1]
    assert demo().decode(ids) == REPLACEMENT
    assert pieces_of(demo(), ids, [1]) == ["", REPLACEMENT]


def test_an_emoji_over_several_tokens_comes_whole() -> None:
    """Byte-level pieces of one character show nothing until the last."""
    ids = demo().encode("so \N{GRINNING FACE}!", add_special_tokens=False)
    pieces = pieces_of(demo(), ids, [1])
    assert [piece for piece in pieces if piece][-2:] == ["\N{GRINNING FACE}", "!"]
    assert len(ids) > len([piece for piece in pieces if piece])


def truncate(text: str, stop: list[str]) -> tuple[str, int | None]:
    """Cut a text before its first stop string, found character by character.

    Returns:
        What is left, and where the stop string ends; None if there is none.
    """
    for end in range(len(text) + 1):
        if found := [each for each in stop if text[:end].endswith(each)]:
            return text[: end - max(map(len, found))], end
    return text, None


def could_become(text: str, stop: list[str]) -> int:
    """Count the characters at the end of a text that begin some stop string."""
    sizes = [n for each in stop for n in range(len(each)) if text.endswith(each[:n])]
    return max(sizes, default=0)


# Two letters make matches, overlaps and near misses frequent.
LETTERS = st.text("ab", max_size=30) | st.text(max_size=20)
STOPS = st.lists(
    st.text("ab", min_size=1, max_size=4) | st.text(min_size=1), max_size=3
)


@settings(max_examples=20 * EXAMPLES)
@given(text=LETTERS, stop=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_in_any_split(text: str, stop: list[str], cuts: list[int]) -> None:
    """Shown is all that is certain, and at the end the text before the first stop."""
    expected, end = truncate(text, stop)
    finder = StopFinder(stop)
    shown, seen = "", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        shown += finder.push(text[seen:cut])
        seen = cut
        if end is not None and end <= seen:
            assert (finder.found, shown) == (True, expected)
        else:
            assert not finder.found
            assert shown == text[: seen - could_become(text[:seen], stop)]
    shown += finder.push("", final=True)
    assert shown == expected
    assert finder.push("more", final=True) == ("" if finder.found else "more")


@settings(max_examples=5 * EXAMPLES)
@given(text=st.text("ab é\N{GRINNING FACE}", max_size=40), stop=STOPS, sizes=RUNS)
def test_stop_strings_in_any_tokens(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    """Decoder and finder together give the text before the first stop string."""
    ids = demo().encode(text, add_special_tokens=False)
    finder = StopFinder(stop)
    pieces = pieces_of(demo(), ids, sizes)
    shown = [finder.push(piece) for piece in pieces] + [finder.push("", final=True)]
    assert "".join(shown) == truncate(demo().decode(ids), stop)[0]


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["ab"], "xaab", "xa"),
        (["bc", "abc"], "xabcd", "x"),
        (["abcd", "b"], "xabcd", "xa"),
        (["aab"], "aaab", "a"),
        ([], "ab", "ab"),
    ],
)
def test_the_first_stop_string(stop: list[str], text: str, shown: str) -> None:
    """The first to be complete counts, and of two at once the longer."""
    for pieces in (list(text), [text]):
        finder = StopFinder(stop)
        assert "".join(finder.push(piece) for piece in pieces) == shown
        assert finder.found == bool(stop)


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
    with pytest.raises(RequestError, match="chat_template"):
        byte_fallback().apply_chat_template(SCENE)


def test_folders(tmp_path: Path) -> None:
    """A folder without a tokenizer has none; a damaged one is an error."""
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "none"}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
