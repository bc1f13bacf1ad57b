"""A card that others have filled; run by itself, since it fills the card."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from tests.engines import Run, drain, greedy, make_engine
from tests.factories import model_config
from tests.scenarios.common import text

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MIB = 2**20


@contextmanager
def filled_card(free_mib: int) -> Generator[None]:
    """Leave so much of the card free."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - free_mib * MIB, dtype=torch.uint8, device=CUDA)
    try:
        yield
    finally:
        del hog
        torch.cuda.empty_cache()


def start(graphs: str = "all") -> Any:
    """Build an engine with small pools."""
    return make_engine(
        model_config("hybrid"),
        "optimized",
        device=CUDA,
        graphs=graphs,
        num_blocks=8,
        debug=("integrity",),
    )


def serve(engine: Any) -> Run:
    """Serve two prompts."""
    engine.reset()
    for index, length in enumerate((33, 7)):
        engine.add(text(length, index), greedy(4), str(index))
    return drain(engine)


def tokens(run: Run) -> dict[str, list[int]]:
    """List what each request was given."""
    return {name: output.token_ids for name, output in run.outputs.items()}


def test_a_full_card_is_told_before_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools fit, graphs do not; engines that there are go on, and so do later ones."""
    engine = start()
    expected = tokens(serve(engine))
    with filled_card(64), monkeypatch.context() as patch:

        def begin(*_: Any, **__: Any) -> None:
            raise AssertionError("a capture began")

        patch.setattr(torch.cuda, "graph", begin)
        with pytest.raises(ConfigError, match="too little memory.*lower"):
            start()
        run = serve(engine)
        assert tokens(run) == expected
        assert {record.mode for record in run.records} == {"graph"}
        assert tokens(serve(start("padded"))) == expected
    assert tokens(serve(start())) == expected


@pytest.mark.parametrize("free_mib", [260, 300, 400, 600])
def test_a_card_almost_full_either_holds_graphs_or_is_told_to_be(free_mib: int) -> None:
    """Whatever is left, the process can go on."""
    expected = tokens(serve(start("padded")))
    with filled_card(free_mib):
        try:
            assert tokens(serve(start())) == expected
        except ConfigError as error:
            assert "too little memory" in str(error)
    assert tokens(serve(start())) == expected
