"""Older forms beside what replaced them: the same work, measured by one command."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import claims, reports
from benchmarks.ladder import counted_copies, large_tiles, staged_copies
from lockstep.optimized.kernels import conv1d
from tests.engines import CPU, greedy, make_engine
from tests.factories import model_config
from tests.tolerances import assert_equal, assert_same_order

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time once, since nobody looks at the times."""
    monkeypatch.setattr(claims, "TIMES", 1)
    monkeypatch.setattr(claims, "WARM_UPS", 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return all that the command writes on a CPU, with the torch tier."""
    folder = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "TIMES", 1)
        patch.setattr(claims, "WARM_UPS", 0)
        claims.main(device="cpu", output=folder, commit="abc")
    return json.loads((folder / "claims_cpu.json").read_text(encoding="utf-8"))


def test_each_claim_is_measured_or_says_why_not(measured: dict[str, Any]) -> None:
    """All forms that a CPU has store the same states; the rest is named."""
    assert set(measured["parts"]) == set(measured["claims"]) == set(claims.CLAIMS)
    assert measured["environment"]["commit"] == "abc"
    for rows in measured["parts"].values():
        assert rows
        for row in rows:
            if "skipped" in row:
                assert row["skipped"]
                continue
            assert row["bit_for_bit"] is True
            assert row["ms"] > 0 and row["ratio"] > 0
            # Two a prompt: at its end, and at the block before.
            assert row["stored_states"] == 2 * int(row["work"].split()[0])
    skipped = [
        (part, row["form"])
        for part, rows in measured["parts"].items()
        for row in rows
        if "skipped" in row
    ]
    assert ("tiles", "all") in skipped and ("graphs", "all") in skipped
    assert all(row["decode_ms"] > 0 for row in measured["parts"]["streams"][1:])


WITHOUT_TRITON = """
import sys
from pathlib import Path
sys.modules["triton"] = None
from benchmarks import claims
claims.TIMES, claims.WARM_UPS, claims.DECODES = 1, 0, 1
claims.main(device="cpu", output=Path(sys.argv[1]), commit="abc")
"""


@pytest.mark.parametrize("interprets", ["", "1"])
def test_a_cpu_without_triton_lacks_one_form_alone(
    interprets: str, tmp_path: Path, measured: dict[str, Any]
) -> None:
    """It is named as skipped; all others are measured."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": interprets}
    command = [sys.executable, "-c", WITHOUT_TRITON, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "claims_cpu.json").read_text(encoding="utf-8"))

    def forms(found: dict[str, Any]) -> set[tuple[str, str, bool]]:
        parts = found["parts"].items()
        return {(n, row["form"], "ms" in row) for n, rows in parts for row in rows}

    form = "staging", "by a device count"
    assert forms(measured) - forms(found) == {(*form, True)}
    assert forms(found) - forms(measured) == {(*form, False)}
    assert {"form": form[1], "skipped": "it needs Triton"} in found["parts"]["staging"]


def test_loops_read_more_than_what_replaced_them(measured: dict[str, Any]) -> None:
    """One read for a step at once, some in loops, and dozens from device tables."""
    rows = measured["parts"]["bookkeeping"]
    reads = {row["form"]: row["host_reads"] for row in rows}
    assert list(reads) == list(claims.BOOKKEEPING)
    assert reads["one copy"] == reads["an array at a time"] == 1
    assert 1 < reads["loops"] < reads["loops, tables on the device"]


def test_staging_is_as_long_as_its_form_says(measured: dict[str, Any]) -> None:
    """Three rows for each request or padded prompt, or one for each state."""
    rows = [row for row in measured["parts"]["staging"] if "ms" in row]
    for row in rows:
        prompts = int(row["work"].split()[0])
        expected = {
            "in place": 0,
            "by max_requests": 3 * row["max_requests"],
            "by padded prompts": 3 * prompts,
            "by a device count": row["stored_states"],
        }
        assert row["staged_rows"] == expected[row["form"]]


def test_what_is_wrong_is_not_timed(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A form that stores other states is named, and the status is 1."""

    def stage(model: Any, ssm_states: Any, batch: Any) -> None:
        model._staging.fill_(1)

    monkeypatch.setattr(staged_copies.ModelByPrefills, "_stage", stage)
    with pytest.raises(claims.typer.Exit):
        claims.main(device="cpu", only=["staging"], output=tmp_path)
    text = (tmp_path / "claims_cpu.json").read_text(encoding="utf-8")
    wrong = [r for r in json.loads(text)["parts"]["staging"] if "unequal" in r]
    assert {row["form"] for row in wrong} == {"by padded prompts"}
    assert not any("ms" in row for row in wrong)


def test_other_tokens_alone_are_seen(
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Right states excuse no other token; each form gets one line meanwhile."""

    def sample(logits: Tensor, draws: Any) -> Tensor:
        return logits.argmin(1)

    forms: dict[str, Any] = {"in place": {}, "by worst": {"sampler.sample": sample}}
    monkeypatch.setattr(claims, "BOOKKEEPING", forms)
    with pytest.raises(claims.typer.Exit):
        claims.main(device="cpu", only=["bookkeeping"], output=tmp_path)
    text = (tmp_path / "claims_cpu.json").read_text(encoding="utf-8")
    right, wrong = json.loads(text)["parts"]["bookkeeping"]
    assert "ms" in right and "unequal" not in right
    assert wrong["unequal"].startswith("tokens [") and "ms" not in wrong
    first, second = re.findall("^bookkeeping: .*$", capsys.readouterr().err, re.M)
    assert first == f"bookkeeping: in place 2 x 32 {right['ms']:.4g} ms"
    assert second == f"bookkeeping: by worst 2 x 32 (unequal: {wrong['unequal']})"


def test_what_no_count_has_is_told_once(
    measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beneath the table, not in each of its rows."""
    text = io.StringIO()
    monkeypatch.setattr(claims, "console", Console(file=text, width=200))
    claims.show(measured)
    rows = measured["parts"]["bookkeeping"]
    assert all(row["copies"] is None for row in rows)
    assert text.getvalue().count(rows[0]["why_none"]) == 1


def test_a_column_is_of_what_was_counted() -> None:
    """What a file does not have, or could not count, has none."""
    row: dict[str, Any] = {"form": "a", "work": "1", "ms": 20.0, "reads": 3}
    found: dict[str, Any] = {"parts": {"x": [row | {"copies": 7}]}}
    more = "reads", "copies"
    assert "| ms for tokens | 1 | reads | copies |" in reports.claims_table(
        found, "x", *more
    )
    for less in (row, row | {"copies": None}):
        table = reports.claims_table({"parts": {"x": [less]}}, "x", *more)
        assert table.startswith("| ms for tokens | 1 | reads |\n")


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    """A file is no folder."""
    (tmp_path / "file").touch()
    with pytest.raises(claims.typer.BadParameter, match="cannot be a folder"):
        claims.main(device="cpu", only=["tiles"], output=tmp_path / "file")


def test_what_failed_leaves_its_memory_to_others(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its engine is gone, garbage in cycles too, before the next part begins."""
    engines: list[weakref.ref[Any]] = []

    def see(bench: Any, engine: Any, prompts: int) -> Any:
        engines.append(weakref.ref(engine))
        raise RuntimeError("no [/file]")

    def write(*given: Any) -> None:
        assert [engine() for engine in engines] == [None]

    monkeypatch.setattr(claims.Bench, "see", see)
    monkeypatch.setattr(claims.reports, "write", write)
    gc.disable()
    try:
        with pytest.raises(claims.typer.Exit):
            claims.main(device="cpu", only=["graphs"], output=tmp_path)
    finally:
        gc.enable()
    assert engines


def test_what_counts_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parts are measured in their own order, however they are named."""
    for part in ("bookkeeping", "graphs"):
        monkeypatch.setattr(claims, part, lambda bench: iter([]))
    claims.main(device="cpu", only=["bookkeeping", "tiles", "graphs"], output=tmp_path)
    text = (tmp_path / "claims_cpu.json").read_text(encoding="utf-8")
    assert list(json.loads(text)["parts"]) == ["tiles", "graphs", "bookkeeping"]


@pytest.mark.parametrize(
    "given",
    [{"device": "cpu", "only": ["tile"]}, {"device": "cpu", "shape": "nano"}]
    + [{"device": "gpu"}],
)
def test_unknown_names_are_refused(given: dict[str, Any]) -> None:
    """The error says what is known."""
    with pytest.raises(claims.typer.BadParameter, match="known are|use auto"):
        claims.main(**given)


STAGING = [
    staged_copies.ModelByRequests,
    staged_copies.ModelByPrefills,
    counted_copies.ModelByCount,
    staged_copies.ModelWithLoop,
]


@pytest.mark.parametrize("form", STAGING)
def test_staged_copies_hold_what_is_stored(form: type) -> None:
    """The buffer has every state, and what comes out of it is what went in."""
    engine, expected = (
        make_engine(
            model_config("hybrid"), "optimized", components=parts, graphs="padded"
        )
        for parts in ({"model.Model": form}, {})
    )
    for each in (engine, expected):
        for prompt in ([1] * 32, [2] * 20):
            each.add(prompt, greedy(1))
    record, other = engine.step(), expected.step()
    assert record.tokens == other.tokens
    slots = [s.slot_id for row in record.rows for s in row.snapshots]
    assert len(slots) == 3
    stored = expected.caches.ssm[:, slots]
    assert_equal(engine.caches.ssm[:, slots], stored)
    assert_equal(engine.model._staging[:, : len(slots)], stored)


def test_only_counted_rows_are_copied() -> None:
    """Programs beyond the count, which is on the device, do nothing."""
    source, target = torch.arange(2.0 * 4 * 6).view(2, 4, 6), torch.zeros(2, 5, 6)
    rows, places = torch.tensor([3, 0, 1]), torch.tensor([4, 2, 0])
    counted_copies.copy_rows(source, target, rows, places, torch.tensor(2))
    assert_equal(target[:, [4, 2]], source[:, [3, 0]])
    assert not target[:, [0, 1, 3]].any()


@pytest.mark.parametrize("count", [1, 130, 700])
def test_inputs_of_the_convolution_are_those_of_a_step(count: int) -> None:
    """Rows, chunks and tiles cover all tokens, whatever convolves them."""
    *tensors, batch = claims.conv_inputs(count, 32, CPU)
    # In bfloat16, kernels are interpreted wrongly.
    given: Any = (*(tensor.float() for tensor in tensors), batch)
    tile = large_tiles.Tile(128, 32, 4)
    expected = conv1d.conv_prefill(*given)
    ready = large_tiles.prepare(given[0], *given[3:])
    windows = given[3].clone()
    actual = large_tiles.convolve(*given, tile=tile, prepared=ready)
    assert_same_order(actual, expected)
    assert_equal(given[3], windows)


def test_tiles_are_compared_before_they_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every size gives what scan chunks give; the grid tells how many programs."""
    from benchmarks import kernels, kernels_mamba

    make = claims.conv_inputs

    def on_cpu(count: int, channels: int, _: torch.device) -> tuple[Any, ...]:
        *tensors, batch = make(count, channels, CPU)
        return *(tensor.float() for tensor in tensors), batch

    monkeypatch.setattr(claims, "conv_inputs", on_cpu)
    monkeypatch.setattr(claims, "TOKENS", (1, 20))
    monkeypatch.setattr(claims, "occupancy", lambda count, *_: {"programs": count})
    monkeypatch.setattr(kernels, "time_calls", lambda calls, _: 1e-3 * len(calls))
    monkeypatch.setattr(kernels, "ROTATED", 0)
    monkeypatch.setattr(kernels_mamba, "CHANNELS", 256)
    rows = [*claims.tiles(torch.device("cuda"))]
    forms = {row["form"] for row in rows}
    assert len(rows) == 2 * len(forms) == 12
    assert all(row["ms"] == 1 and row["ratio"] == 1 for row in rows)
    programs = {(row["form"], row["work"]): row["programs"] for row in rows}
    assert programs["8 x 256, 4 warps", "20"] == 3
    assert programs["128 x 64, 4 warps", "20"] == 4
    monkeypatch.setattr(claims, "row_errors", lambda *_: torch.ones(1))
    assert all("unequal" in row for row in claims.tiles(torch.device("cuda")))


@pytest.mark.parametrize(
    ("registers", "held"), [(32, 16), (64, 8), (33, 12), (255, 2), (None, None)]
)
def test_occupancy_is_what_the_registers_leave(
    monkeypatch: pytest.MonkeyPatch, registers: int | None, held: int | None
) -> None:
    """An SM of 64 warps and 65,536 registers holds so many programs of four warps."""
    gpu = SimpleNamespace(
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
        multi_processor_count=10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    metadata = SimpleNamespace(num_warps=4, shared=0)
    compiled = SimpleNamespace(n_regs=registers, n_spills=0, metadata=metadata)
    found = claims.occupancy(20, compiled, CPU)
    assert found["programs"] == 20
    assert found.get("programs_an_sm_holds") == held
    if held:
        assert found["occupancy"] == held * 4 / 64
        assert found["filled"] == min(1.0, 20 / (10 * held))
    else:
        assert found["why_none"]


def test_launches_are_seen_with_their_grids() -> None:
    """A kernel that is spied on runs as ever."""

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: ("compiled", args, kwargs)

    def launches() -> Iterator[list[tuple[int, Any]]]:
        module = SimpleNamespace(kernel=Kernel())
        with claims.spied(module, "kernel") as seen:
            assert module.kernel[(2, 3)](1, warps=4) == ("compiled", (1,), {"warps": 4})
            yield seen

    (seen,) = launches()
    assert seen == [(6, ("compiled", (1,), {"warps": 4}))]


def test_other_parts_of_a_file_are_kept(
    quick: None, tmp_path: Path, measured: dict[str, Any]
) -> None:
    """With the environment that they are of, unless the shape is another."""
    path = tmp_path / "claims_cpu.json"
    path.write_text(json.dumps(measured), encoding="utf-8")
    claims.main(device="cpu", output=tmp_path, commit="def", only=["graphs"])
    found = json.loads(path.read_text(encoding="utf-8"))
    commits = {name: each["commit"] for name, each in found["environments"].items()}
    assert commits == dict.fromkeys(claims.CLAIMS, "abc") | {"graphs": "def"}
    assert set(found["parts"]) == set(claims.CLAIMS)
    assert found["parts"]["staging"] == measured["parts"]["staging"]
    path.write_text(json.dumps(measured | {"shape": "nano3"}), encoding="utf-8")
    claims.main(device="cpu", output=tmp_path, commit="def", only=["graphs"])
    assert [*json.loads(path.read_text(encoding="utf-8"))["parts"]] == ["graphs"]
