"""Pages show what was measured, and say no more than it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reports
from lockstep import rungs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
TABLES = reports.page_tables(RESULTS)
NAMES = [rung.name for rung in rungs.RUNGS]
#: Words that a reader takes in within five minutes.
MOST_WORDS = 1100

Rows = dict[str, dict[str, Any]]


def read(page: str) -> str:
    """Read a page."""
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", TABLES)
def test_tables_are_those_of_the_results(page: str) -> None:
    """Each is the one that is printed from the JSON, and none is left out."""
    text = read(page)
    assert set(re.findall(r"^<!-- (.+) -->$", text, re.M)) == set(TABLES[page])
    current = text == reports.renew(text, TABLES[page])
    assert current, "results are newer than the page: python -m benchmarks.reports"


def test_tables_are_put_beneath_their_comments() -> None:
    """Whatever stood there; the rest of a page is kept."""
    page = "a\n\n<!-- x -->\n| 1 |\n| 2 |\n\n| 3 |\n<!-- y -->\nb\n"
    expected = "a\n\n<!-- x -->\n| X |\n\n| 3 |\n<!-- y -->\n| Y |\nb\n"
    assert reports.renew(page, {"x": "| X |\n", "y": "| Y |\n"}) == expected
    with pytest.raises(KeyError):
        reports.renew(page, {"x": "| X |\n"})


@pytest.mark.parametrize("page", [*TABLES, "docs/correctness.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link names a file of the checkout."""
    links = [
        link for link in re.findall(r"\]\(([^)#]+)\)", read(page)) if ":" not in link
    ]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_ties_are_as_many_as_were_counted() -> None:
    """In bfloat16, in the whole matrix, of which every row passed."""
    results = json.loads((RESULTS / "gpu_matrix_bfloat16.json").read_text())
    (shard,) = results["shards"].values()
    assert shard["is_complete"] and shard["rows"]["passed"] == shard["rows"]["run"]
    ties, tokens = (shard[key]["bfloat16"] for key in ("ties", "tokens"))
    assert f"({ties:,} of {tokens:,} in the matrix" in read("docs/correctness.md")


def test_every_rung_is_told_of_in_order() -> None:
    """In as many words as can be read at once."""
    text = read("docs/ladder.md")
    assert re.findall(r"^\* \*\*(.+)\*\*: ", text, re.M) == NAMES
    prose = re.sub(r"^(?:\||<!--).*\n", "", text, flags=re.M)
    assert len(prose.split()) <= MOST_WORDS


def test_a_table_tells_of_rungs_that_were_cut_idle_or_impossible() -> None:
    """By their lines; what no step has been counted by has no column."""
    row: dict[str, Any] = {
        "rung": "a",
        "status": "equal",
        "reason": "",
        "is_cut": True,
        "prefill_tokens_per_second": 1234.5,
        "decode_tokens_per_second": 6.7,
        "share_of_floor": 0.1234,
        "per_step": {"decode": {"operations": 1000, "launches": None}},
        "measured": {"prompt_tokens": 16, "new_tokens": 3},
    }
    idle = row | {"rung": "b", "reason": "no experts", "is_cut": False}
    none = {"rung": "c", "status": "not possible here", "reason": "no GPU"}
    assert reports.ladder_table({"rungs": [row, idle, none]}).splitlines() == [
        "| rung | prefill | decode | of the floor | operations | timed on |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| a (cut) | 1,234 | 7 | 12.34% | 1,000 | 16 + 3 |",
        "| b (idle) | 1,234 | 7 | 12.34% | 1,000 | 16 + 3 |",
        "| c | not possible here |  |  |  |  |",
    ]


# What the words say of the numbers, with room for noise.


def gain(rows: Rows, name: str, kind: str) -> float:
    """Return how many times as fast a rung is as the one before."""
    before = NAMES[NAMES.index(name) - 1]
    key = f"{kind}_tokens_per_second"
    return rows[name][key] / rows[before][key]


def ladder(name: str) -> Rows:
    """Read the rungs of a committed result."""
    found = json.loads((RESULTS / f"ladder_{name}.json").read_text(encoding="utf-8"))
    return {row["rung"]: row for row in found["rungs"]}


@pytest.mark.parametrize(
    ("machine", "name", "kind", "least", "most"),
    [
        *(("h200", name, "decode", 0.7, 1.3) for name in NAMES[1:4]),
        *(("cpu", name, "decode", 0.7, 1.3) for name in NAMES[1:4]),
        ("h200", "batched products", "decode", 1.5, 9),
        ("cpu", "batched products", "decode", 1.1, 9),
        ("cpu", "batched products", "prefill", 1.4, 9),
        ("h200", "paged attention", "decode", 0.7, 1.3),
        ("cpu", "paged attention", "prefill", 0.8, 1.3),
        ("h200", "chunked scan", "prefill", 30, 999),
        ("cpu", "chunked scan", "prefill", 1.2, 3),
        ("h200", "batched state updates", "decode", 2, 9),
        ("cpu", "grouped experts", "prefill", 1.4, 9),
        ("h200", "sampling on the device", "decode", 0.5, 1.1),
        ("cpu", "sampling on the device", "decode", 0.5, 0.95),
        ("h200", "one copy a step", "decode", 0.5, 1.2),
        ("h200", "fused kernels", "prefill", 3, 99),
        ("h200", "fused kernels", "decode", 1.8, 99),
        ("cpu", "fused kernels", "prefill", 0.8, 1.2),
        ("h200", "static buffers", "decode", 0.8, 1.3),
        ("cpu", "static buffers", "prefill", 0.5, 0.95),
        ("h200", "decode graphs", "decode", 3, 99),
        ("h200", "full graphs", "prefill", 1.1, 5),
    ],
)
def test_rungs_gain_what_the_page_says(
    machine: str, name: str, kind: str, least: float, most: float
) -> None:
    """If this fails after a measurement, mend the words on that rung."""
    assert least < gain(ladder(machine), name, kind) < most


def test_the_rest_of_what_the_ladder_says() -> None:
    """Of steps, counts and rungs that are far from each other."""
    gpu, cpu = ladder("h200"), ladder("cpu")
    prefills = {name: gain(gpu, name, "prefill") for name in NAMES[1:]}
    assert max(prefills, key=lambda name: prefills[name]) == "chunked scan"
    steps = {name: row["per_step"] for name, row in gpu.items()}
    reads = {name: step["decode"]["host_reads"] for name, step in steps.items()}
    at = NAMES.index("sampling on the device")
    assert all((reads[name] == 1) == (NAMES.index(name) >= at) for name in NAMES)
    conv, before = steps["varlen convolution"], steps["paged attention"]
    assert conv["prefill"]["launches"] < before["prefill"]["launches"]
    assert conv["decode"] == before["decode"]
    assert set(gpu["decode graphs"]["steps"]) == {"prefill eager", "decode graph"}
    assert [name for name in NAMES if gpu[name]["reason"]] == [
        "grouped experts",
        "side stream",
    ]
    scan, updates = (gpu[n]["measured"] for n in NAMES[7:9])
    assert scan["prompt_tokens"] < updates["prompt_tokens"]
    last, grouped = cpu["static buffers"], cpu["grouped experts"]
    assert last["tokens_per_second"] < grouped["tokens_per_second"]


def test_claims_are_what_their_words_say() -> None:
    """If this fails after a measurement, mend the words on that part."""
    path = RESULTS / "claims_h200.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"]

    def times(part: str, key: str = "ms") -> Callable[[str, str], float]:
        found = {(row["form"], row["work"]): row[key] for row in parts[part]}
        return lambda form, work: found[form, work]

    staging = times("staging")
    for work in ("1 x 512", "8 x 512", "16 x 512"):
        excess = staging("by max_requests", work) - staging("in place", work)
        for form in ("by padded prompts", "by a device count"):
            saved = staging("by max_requests", work) - staging(form, work)
            assert saved > excess / 2 > 0
    tiles, programs = times("tiles"), times("tiles", "programs")
    for work in ("1", "8", "64", "512"):
        assert tiles("8 x 256, 4 warps", work) < 1.1 * tiles("scan chunks", work)
    for work in ("64", "512"):
        few, many = (programs(n, work) for n in ("scan chunks", "8 x 256, 4 warps"))
        assert many > 2 * few
    for work in ("2048", "4096", "8192", "32768"):
        assert tiles("scan chunks", work) < tiles("8 x 256, 4 warps", work)
    graphs = times("graphs")
    assert graphs("off", "1 x 512") > 1.3 * graphs("all", "1 x 512")
    assert graphs("off", "16 x 512") < 1.1 * graphs("all", "16 x 512")
