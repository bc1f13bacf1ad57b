"""What benchmarks are made of: shapes that load, workloads that anyone can rebuild."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path

import pytest
import torch
import typer

from benchmarks import run
from benchmarks.claims import TINY
from benchmarks.rooflines import floor_seconds
from benchmarks.shapes import SHAPES
from benchmarks.workloads import build
from lockstep.families import read_model_config
from lockstep.llm import LLM
from lockstep.parameters import parameter_specs
from lockstep.request import SamplingParams

#: Digest of all prompts, as first agreed.
WORKLOADS_SHA256 = "96bc3de761fbf8a4590bba628fd695b207e2b31449b254afc17e94c83ba6a3fc"


@pytest.mark.parametrize(
    ("name", "billions", "letters"),
    [("nano3", 31.6, {"M": 23, "E": 23, "*": 6}), ("dense4b", 3.75, {"M": 19, "*": 4})],
)
def test_shapes_have_their_sizes(
    name: str, billions: float, letters: dict[str, int]
) -> None:
    """The published shapes are read as what they are."""
    config = read_model_config(SHAPES[name])
    count = 0
    for spec in parameter_specs(config).values():
        size = 1
        for length in spec.shape:
            size *= length
        count += size
    assert count / 1e9 == pytest.approx(billions, abs=0.05)
    assert {k: config.layer_pattern.count(k) for k in letters} == letters


def test_workloads_are_the_agreed_tokens() -> None:
    """Every engine is measured on the same token ids."""
    digest = hashlib.sha256()
    for workload in build(0):
        for prompt in workload.prompts:
            digest.update(array("q", prompt).tobytes())
    assert digest.hexdigest() == WORKLOADS_SHA256


def test_cells_that_are_not_there_are_named() -> None:
    """Before any model is built."""
    known = "is none of nano3, dense4b, decode_b1"
    with pytest.raises(typer.BadParameter, match=f"nano4 {known}"):
        run.main(shape=["nano4"])
    with pytest.raises(typer.BadParameter, match=f"ttft {known}"):
        run.main(workload=["ttft"])


def test_cells_want_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 63 GB are not drawn on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="need a GPU, and torch finds none"):
        run.main()


def test_a_small_model_of_a_published_pattern_runs() -> None:
    """Any shape runs without a folder, by token ids."""
    pattern = ("hybrid_override_pattern", "num_hidden_layers")
    fields = TINY | {name: SHAPES["nano3"][name] for name in pattern}
    llm = LLM.from_config(fields, verbose=False)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    output = llm.generate([3, 1, 4, 1, 5], sampling)[0]
    assert len(output.token_ids) == 9 and output.text == ""


def test_floors_are_those_that_peers_were_measured_beside() -> None:
    """Every figure stands beside the same floor, whoever it is of."""
    path = Path(__file__).parents[1] / "benchmarks/results/peers_h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert set(rows) == set(SHAPES)
    for shape, cells in rows.items():
        for workload in build(0):
            # For this one a better model was noted than the floor's.
            if workload.name != "mixed_64":
                stated = cells[workload.name]["floor_s"]
                assert round(floor_seconds(shape, workload), 4) == stated
