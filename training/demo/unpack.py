"""Take the source texts out of the two unpacked packages, under stable names."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent


def r_lines(database: bytes, offset: int) -> Iterator[bytes]:
    """Yield the strings of the character vector at an offset of an R database.

    The vector is a big-endian length, a zlib stream, and in it R's serialization
    (version 3) in network byte order.
    """
    (size,) = struct.unpack_from(">I", database, offset)
    data = zlib.decompress(database[offset + 4 : offset + 4 + size])
    (encoding_length,) = struct.unpack_from(">i", data, 14)
    place = 18 + encoding_length
    (count,) = struct.unpack_from(">i", data, place + 4)
    place += 8
    for _ in range(count):
        (length,) = struct.unpack_from(">i", data, place + 4)
        place += 8
        yield data[place : place + length]
        place += length


def main(
    austen: Annotated[Path, typer.Argument(help="janeaustenr's data/Rdata.rdb.")],
    shakespeare: Annotated[Path, typer.Argument(help="shksprdata/texts.")],
    out: Annotated[Path, typer.Argument(help="Folder for the plain texts.")],
) -> None:
    """Write every text that sources.sha256 names; prepare.py checks them."""
    out.mkdir(parents=True, exist_ok=True)
    database = austen.read_bytes()
    for line in (HERE / "sources.sha256").read_text().splitlines():
        name = line.split()[1]
        author, _, title = name.removesuffix(".txt").partition("_")
        if author == "austen":
            # A novel is named by its offset in the database.
            text = b"\n".join(r_lines(database, int(title)))
        else:
            text = (shakespeare / f"{title}_gut.txt").read_bytes()
        (out / name).write_bytes(text)


if __name__ == "__main__":
    typer.run(main)
