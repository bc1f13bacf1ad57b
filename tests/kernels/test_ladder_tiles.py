"""The convolution in large tiles, which smaller ones replaced, is the same one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.ladder import large_tiles
from tests.equivalence import test_conv1d
from tests.factories import load
from tests.plans import Slice, build, make_sizes, make_step

SIZES = make_sizes()
TILES = dict.fromkeys((*large_tiles.LARGE_TILES, *large_tiles.LATER_TILES))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("width", [2, 4])
def test_convolutions(
    monkeypatch: pytest.MonkeyPatch, tile: large_tiles.Tile, width: int
) -> None:
    """Rows shorter than the window, and tiles that hold several rows or end in one."""
    convolve = partial(large_tiles.convolve, tile=tile)

    def load_tiles(side: str, module: str) -> Any:
        twin = load(side, module)
        tiled = SimpleNamespace(**vars(twin) | {"conv_prefill": convolve})
        return twin if side == "reference" else tiled

    monkeypatch.setattr(test_conv1d, "load", load_tiles)
    step = make_step(SIZES, [Slice(7, 8)], test_conv1d.edge_slices(width, 5))
    batch = build("optimized", SIZES, step, all_logits=False)
    test_conv1d.assert_twins(batch, width=width, has_bias=tile.tokens > 8)


def test_the_component_is_the_largest_tile() -> None:
    """What an engine is given by name."""
    assert large_tiles.LARGE_TILES[-1] == max(large_tiles.LARGE_TILES)
