"""Scenes made for graphs, at padded shapes: what a GPU replays, run eagerly."""

from __future__ import annotations

import pytest

from lockstep.config import DTypeName
from tests.engines import CPU
from tests.graph_scenes import CASES, Note, config_of, follow_scene, modes_by_kind

#: One of each that the published scenarios, which CI plays as they are, leave out.
CHEAP = [
    case
    for case in CASES
    if case[0] in ("restore beside a snapshot", "eviction") and case[2] == "float32"
]


@pytest.mark.parametrize(("name", "model", "dtype"), CHEAP)
def test_a_scene_at_padded_shapes(
    name: str, model: str, dtype: DTypeName, record_property: Note
) -> None:
    """Every kind of step is seen, at a padded shape, and equals the reference's."""
    config = config_of(model, dtype)
    records = follow_scene(name, config, "padded", CPU, record_property)
    assert set().union(*modes_by_kind(records).values()) == {"padded"}
