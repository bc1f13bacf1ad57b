"""Turn the source texts into documents: pieces of a novel, a play or a poem."""

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SPEAKER, SPEECH = "<speaker>", "<speech>"

# One section (a chapter or a scene) in this many is held out.
HELD_OUT_EVERY = 20
# A document ends at the first paragraph or speech past a random length in this
# range, so that the model sees text begin at any point of a chapter or a scene.
DOCUMENT_CHARACTERS = (300, 2800)

POEMS = (
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
)

# Three plays abbreviate their speaker headings; these are the main parts.
PARTS = {
    "hamlet": {
        "BER": "BERNARDO",
        "FRAN": "FRANCISCO",
        "HOR": "HORATIO",
        "MAR": "MARCELLUS",
        "LAER": "LAERTES",
        "POL": "POLONIUS",
        "HAM": "HAMLET",
        "OPH": "OPHELIA",
        "REY": "REYNALDO",
        "ROS": "ROSENCRANTZ",
        "GUIL": "GUILDENSTERN",
        "VOLT": "VOLTIMAND",
        "I PLAY": "FIRST PLAYER",
        "I PLAYER": "FIRST PLAYER",
        "P. KING": "PLAYER KING",
        "P. QUEEN": "PLAYER QUEEN",
        "CAPT": "CAPTAIN",
        "GENT": "GENTLEMAN",
        "MESS": "MESSENGER",
        "OSR": "OSRIC",
        "FOR": "FORTINBRAS",
        "FORT": "FORTINBRAS",
    },
    "lear": {
        "GLOU": "GLOSTER",
        "EDM": "EDMUND",
        "GON": "GONERIL",
        "COR": "CORDELIA",
        "REG": "REGAN",
        "BUR": "BURGUNDY",
        "EDG": "EDGAR",
        "OSW": "OSWALD",
        "ALB": "ALBANY",
        "GENT": "GENTLEMAN",
        "CUR": "CURAN",
        "CORN": "CORNWALL",
        "FIRST SERV": "FIRST SERVANT",
        "SECOND SERV": "SECOND SERVANT",
        "THIRD SERV": "THIRD SERVANT",
        "MESS": "MESSENGER",
        "PHYS": "PHYSICIAN",
        "DOCT": "DOCTOR",
        "CAPT": "CAPTAIN",
        "HER": "HERALD",
        "OFF": "OFFICER",
    },
    "henry_iv_part_1": {
        "WEST": "WESTMORELAND",
        "FAL": "FALSTAFF",
        "WOR": "WORCESTER",
        "NORTH": "NORTHUMBERLAND",
        "HOT": "HOTSPUR",
        "OST": "OSTLER",
        "GADS": "GADSHILL",
        "CHAM": "CHAMBERLAIN",
        "BARD": "BARDOLPH",
        "SERV": "SERVANT",
        "FRAN": "FRANCIS",
        "VINT": "VINTNER",
        "HOST": "HOSTESS",
        "SHER": "SHERIFF",
        "CAR": "CARRIER",
        "MORT": "MORTIMER",
        "GLEND": "GLENDOWER",
        "LADY": "LADY PERCY",
        "LADY P": "LADY PERCY",
        "DOUG": "DOUGLAS",
        "MESS": "MESSENGER",
        "VER": "VERNON",
        "ARCH": "ARCHBISHOP",
        "SIR M": "SIR MICHAEL",
        "LAN": "LANCASTER",
    },
}

_CHAPTER = re.compile(r"^ *(?:CHAPTER|Chapter) +(?:\d+|[IVXL]+)\b.*$", re.M)
_SCENE = re.compile(r"^ *(?:ACT|SCENE|Act|Scene) +(?:\d+|[IVX]+|FIRST)\b.*$", re.M)
_ANY_SCENE = re.compile(r"^ *(?:ACT|SCENE|Act|Scene)\b.*$", re.M)
_DIRECTION = re.compile(r"[\[{][^\]}]{0,900}[\]}]")
_BARE_DIRECTION = re.compile(
    r"(?:Enter|Exit|Exeunt|Re-enter|Flourish|Alarum|Dead March)\b"
)
_HEADING = re.compile(r"[A-Z][A-Za-z'., \-&]{0,40}[.:]")
_BARE_HEADING = re.compile(r"[A-Z][A-Z' ]{2,30}")


@dataclass(frozen=True)
class Document:
    """A stretch of text with its special tokens, and where it belongs."""

    text: str
    held_out: bool


def verify(folder: Path, checksums: Path) -> list[Path]:
    """Return the source files in order, having checked each SHA-256 sum."""
    paths = []
    for line in checksums.read_text().splitlines():
        expected, name = line.split()
        path = folder / name
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise ValueError(f"{name} is not the file this recipe was made for")
        paths.append(path)
    return paths


def documents(paths: list[Path], seed: int) -> Iterator[Document]:
    """Yield every document of the given source files."""
    rng = random.Random(seed)
    number = 0
    for path in paths:
        for parts, joiner in _sections(path):
            held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            number += 1
            for text in _cut(parts, joiner, rng):
                yield Document(text, held_out)


def _sections(path: Path) -> Iterator[tuple[list[str], str]]:
    """Yield each section of a file as its parts and the string that joins them."""
    text = path.read_text(encoding="utf-8").replace("\r", "")
    author, _, name = path.stem.partition("_")
    if author == "austen":
        for chapter in _CHAPTER.split(text)[1:]:
            yield _paragraphs(chapter), "\n\n"
    elif name in POEMS:
        stanzas = _stanzas(text)
        for start in range(0, len(stanzas), 20):
            yield stanzas[start : start + 20], "\n\n"
    else:
        for scene in _scenes(text):
            yield _speeches(scene, PARTS.get(name, {})), ""


def _cut(parts: list[str], joiner: str, rng: random.Random) -> Iterator[str]:
    """Join parts into documents of random lengths."""
    held: list[str] = []
    limit = rng.randint(*DOCUMENT_CHARACTERS)
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= limit:
            yield _document(held, joiner)
            held, limit = [], rng.randint(*DOCUMENT_CHARACTERS)
    if held:
        yield _document(held, joiner)


def _document(parts: list[str], joiner: str) -> str:
    """Wrap the parts in the begin and end tokens; a speech has its own end."""
    text = BOS + joiner.join(parts)
    return text if text.endswith(EOS) else text + EOS


def _paragraphs(chapter: str) -> list[str]:
    """Unwrap a chapter's paragraphs, without rulings, ends and emphasis marks."""
    found = []
    for block in re.split(r"\n\s*\n", chapter.replace("_", "")):
        line = " ".join(block.split())
        if len(line) > 12 and line.upper() not in ("THE END", "FINIS"):
            found.append(line)
    return found


def _stanzas(text: str) -> list[str]:
    """Split a poem at its blank lines, without title and numerals."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.splitlines()]
        stanza = "\n".join(line for line in lines if line.strip("_ "))
        if stanza.count("\n") > 1:
            found.append(stanza)
    return found


def _scenes(text: str) -> list[str]:
    """Split a play at its act and scene headings, without the list of parts."""
    first = _SCENE.search(text)
    return _ANY_SCENE.split(text[first.end() :]) if first else []


def _speeches(scene: str, names: dict[str, str]) -> list[str]:
    """Return a scene's speeches, each as speaker, words and end of speech."""
    lines = [line.strip() for line in _DIRECTION.sub("", scene).splitlines()]
    is_heading = _heading_test(lines)
    found: list[tuple[str, list[str]]] = []
    for index, line in enumerate(lines):
        if is_heading(index):
            found.append((_speaker(line, names), []))
        elif line and found and not _BARE_DIRECTION.match(line):
            found[-1][1].append(" ".join(line.split()))
    return [
        f"{SPEAKER}{name}{SPEECH}" + "\n".join(words) + EOS
        for name, words in found
        if words
    ]


def _heading_test(lines: list[str]) -> Callable[[int], bool]:
    """Return the test for speaker headings in this scene's style."""
    stopped = [line for line in lines if _HEADING.fullmatch(line)]
    capitals = sum(line.isupper() for line in stopped)
    mixed = capitals * 2 < len(stopped)

    def test(index: int) -> bool:
        line = lines[index]
        if index and lines[index - 1]:
            return False
        if _BARE_HEADING.fullmatch(line):
            return capitals == 0
        fits = line.isupper() or (mixed and len(line.split()) <= 3)
        return fits and bool(_HEADING.fullmatch(line))

    return test


def _speaker(heading: str, names: dict[str, str]) -> str:
    """Return the speaker's full name in capitals."""
    name = " ".join(heading.rstrip(".:").upper().split())
    return names.get(name, name)
