"""A card that others have filled; run by itself, since it fills the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from tests.engines import make_engine
from tests.factories import model_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_a_full_card_is_told_before_anything_runs() -> None:
    """Pools fit, graphs do not: the error names what to lower."""
    options: dict[str, Any] = {"num_blocks": 8, "debug": ()}
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 96 * 2**20, dtype=torch.uint8, device=CUDA)
    try:
        with pytest.raises(ConfigError, match="too little memory.*lower"):
            make_engine(
                model_config("hybrid"),
                "optimized",
                device=CUDA,
                graphs="all",
                **options,
            )
    finally:
        del hog
        torch.cuda.empty_cache()
