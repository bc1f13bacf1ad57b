"""The ladder as a user climbs it: what is equal is timed, and nothing else."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import counting, reports, rooflines, serving
from benchmarks.claims import TINY as TINY_SHAPE
from benchmarks.kernels import ROTATED
from benchmarks.reference_speed import environment
from benchmarks.rooflines import (
    H200,
    Counts,
    Rates,
    choose_rates,
    count,
    floor_of,
    step_seconds,
)
from benchmarks.serving import Load, Served
from benchmarks.shapes import GRANITE_350M, SHAPES
from lockstep import cli, ladder, rungs
from lockstep.families import read_config_files, read_model_config
from lockstep.ladder import COUNTED, Ladder, why_idle
from lockstep.llm import find_folder
from lockstep.optimized import linear, sampler
from lockstep.parameters import num_parameters
from lockstep.rungs import Rung
from tests.engines import CPU, make_engine
from tests.factories import model_config
from tests.tolerances import SMALL_PARAMETERS

ROOT = Path(__file__).resolve().parents[1]
TINY = ("--device", "cpu", "--prompts", "2", "--prompt-tokens", "8")
Main = Callable[..., int]


@pytest.fixture
def climb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """Return a function that climbs with a tiny workload, and gives the status."""

    def run(*arguments: str) -> int:
        own = (*TINY, "--new-tokens", "3", "--output", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["lockstep", "ladder", *own, *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    return run


def read(folder: Path) -> dict[str, Any]:
    """Read what was written."""
    return json.loads((folder / "ladder_cpu.json").read_text(encoding="utf-8"))


def test_rungs_are_compared_timed_and_counted(climb: Main, tmp_path: Path) -> None:
    """The file says with what, how fast, and what a step asks for."""
    names = ("loops", "sampling on the device", "static buffers", "decode graphs")
    assert climb(*(part for name in names for part in ("--only", name))) == 0
    found = read(tmp_path)
    assert {"device", "torch", "commit", "date"} <= set(found["environment"])
    assert found["workload"] == {"prompts": 2, "prompt_tokens": 8, "new_tokens": 3}
    assert (found["model"], found["dtype"]) == ("demo", "float32")
    *possible, last = found["rungs"]
    assert (last["status"], "tokens_per_second" in last) == ("not possible here", False)
    assert "needs a GPU" in last["reason"]
    for row, name in zip(possible, names, strict=False):
        assert (row["rung"], row["status"]) == (name, "equal")
        error = row["equality"]["largest_error_in_roundoffs"]
        assert error <= found["equality"]["bound_in_roundoffs"]
        assert row["equality"]["steps"] == possible[0]["equality"]["steps"] > 1
        assert row["measured"] == found["workload"]
        for rate in ("tokens_per_second", "decode_steps_per_second", "share_of_floor"):
            assert 0 < row[rate] < math.inf
        for kind, num_tokens in (("prefill", 62), ("decode", 2)):
            step = row["per_step"][kind]
            # Each prompt stores a state within, and its decode one at a block's end.
            assert (step["tokens"], step["stored_states"]) == (num_tokens, 2)
            assert step["operations"] > 0
            assert step["launches"] is step["copies"] is None and step["why_none"]
    loops, sampled, padded = (row["per_step"]["decode"] for row in possible)
    assert loops["host_reads"] > sampled["host_reads"] == padded["host_reads"] == 1
    assert loops["operations"] > padded["operations"]
    assert found["counted"] == asdict(COUNTED) | {"block_size": 16}
    assert all(row["seconds"] > 0 for row in found["rungs"])
    assert set(possible[-1]["steps"]) == {"prefill padded", "decode padded"}


def test_counted_blocks_are_short_whatever_a_model_has(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no prompt would end one, and copies of states would cost nothing."""
    monkeypatch.setitem(ladder.SHAPES, "tiny", TINY_SHAPE | {"chunk_size": 32})
    assert climb("--model", "tiny", "--only", "loops") == 0
    (row,) = read(tmp_path)["rungs"]
    assert [step["stored_states"] for step in row["per_step"].values()] == [2, 2]


def test_by_the_wall_clock_the_faster_of_two_times_is_kept(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many tokens, and never of fewer than the rung before was timed on."""
    names = ["batched products", "chunked scan", "static buffers"]
    real, timed = Ladder.time, list[tuple[str, Load | None, Load | None]]()

    def time(
        self: Ladder, rung: Rung, least: Load | None = None, most: Load | None = None
    ) -> dict[str, Any]:
        """Be slow on the way up but in the last rung; the first gets half."""
        timed.append((rung.name, least, most))
        speed = 1.0 + ((rung.name == names[-1]) != (most is not None))
        load = most or (self.load if least else self.load.cut(2))
        found = real(self, rung, load, load)
        return found | {"tokens_per_second": speed}

    monkeypatch.setattr(Ladder, "time", time)
    monkeypatch.setattr(Ladder, "is_disturbed", True)
    # However they are named, they are climbed from slow to fast.
    assert climb(*(part for name in names[::-1] for part in ("--only", name))) == 0
    whole, half = Load(2, 8, 3), Load(2, 4, 3)
    assert timed == [
        (names[0], None, None),
        (names[1], half, None),
        (names[2], whole, None),
        (names[2], whole, whole),
        (names[1], whole, whole),
        (names[0], half, half),
    ]
    rows = read(tmp_path)["rungs"]
    assert [row["tokens_per_second"] for row in rows] == [2.0, 2.0, 2.0]
    assert [row["measured"]["prompt_tokens"] for row in rows] == [4, 8, 8]
    assert [row["is_cut"] for row in rows] == [True, False, False]


def test_a_rung_that_fails_on_the_way_down_has_failed(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was timed on the way up."""
    real, timed = Ladder.time, list[str]()

    def time(self: Ladder, rung: Rung, *parts: Load | None) -> dict[str, Any]:
        timed.append(rung.name)
        if len(timed) > 1:
            raise RuntimeError("no more")
        return real(self, rung, *parts)

    monkeypatch.setattr(Ladder, "time", time)
    monkeypatch.setattr(Ladder, "is_disturbed", True)
    assert climb("--only", "batched products") == cli.ENGINE_ERROR
    (row,) = read(tmp_path)["rungs"]
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: no more")


def doubled(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply wrongly."""
    return 2 * linear.linear(inputs, weight, bias)


def test_what_is_wrong_is_named_and_not_timed(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 1; the part to blame is named; other rungs are timed."""
    wrong = rungs.find("batched products")
    parts: Any = {**wrong.components, "linear.linear": doubled}
    table = (*rungs.RUNGS[:1], replace(wrong, components=parts))
    monkeypatch.setattr(rungs, "RUNGS", table)
    assert climb() == cli.ENGINE_ERROR
    right, row = read(tmp_path)["rungs"]
    assert right["status"] == "equal"
    assert row["status"] == "unequal"
    assert "to blame: linear.linear" in row["reason"]
    assert not {"measured", "tokens_per_second", "per_step"} & set(row)


def test_other_tokens_alone_are_seen(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities that are right excuse no other token."""

    def sample(logits: Tensor, draws: Any) -> Tensor:
        return logits.argmin(1)

    rung = replace(rungs.RUNGS[1], components={"sampler.sample": sample})  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(rungs, "RUNGS", (rungs.RUNGS[0], rung))
    assert climb("--only", rung.name) == cli.ENGINE_ERROR
    (row,) = read(tmp_path)["rungs"]
    assert row["status"] == "unequal"
    assert "step 1: tokens" in row["reason"]


def test_log_probabilities_are_held_to_their_class(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is a hundredth off is unequal, though every token is right."""

    def scaled(logits: Tensor) -> Tensor:
        return 1.01 * sampler.log_probabilities(logits)

    rung = replace(rungs.RUNGS[1], components={"sampler.log_probabilities": scaled})  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(rungs, "RUNGS", (rungs.RUNGS[0], rung))
    assert climb("--only", rung.name) == cli.ENGINE_ERROR
    (row,) = read(tmp_path)["rungs"]
    assert row["status"] == "unequal"
    assert "step 1: log-probabilities are" in row["reason"]


def test_a_failed_request_is_named(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended it is the reason, though there is nothing to compare."""

    def broken(*_: Any) -> Any:
        raise ValueError("no such thing")

    parts: Any = {"mlp.activate": broken}
    rung = replace(rungs.RUNGS[1], components=parts)
    monkeypatch.setattr(rungs, "RUNGS", (rungs.RUNGS[0], rung))
    assert climb("--only", rung.name) == cli.ENGINE_ERROR
    (row,) = read(tmp_path)["rungs"]
    assert row["status"] == "unequal"
    assert "failed with ValueError: no such thing" in row["reason"]


def test_other_plans_are_seen_before_their_numbers(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is cut elsewhere has rows to which there is no counterpart."""
    rung = replace(rungs.RUNGS[1], options={"max_tokens_per_step": 20})
    monkeypatch.setattr(rungs, "RUNGS", (rungs.RUNGS[0], rung))
    assert climb("--only", rung.name) == cli.ENGINE_ERROR
    (row,) = read(tmp_path)["rungs"]
    assert (row["status"], row["equality"]["steps"]) == ("unequal", 0)
    assert "step 1: another plan" in row["reason"]


def test_a_rung_that_fails_loses_no_other(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is in the file, beside what others gave; the status is 1."""
    broken = replace(rungs.RUNGS[0], name="broken", components={"moe.route": "no:x"})
    monkeypatch.setattr(rungs, "RUNGS", (broken, *rungs.RUNGS[:1]))
    monkeypatch.setattr(serving, "RUNS", 0)
    assert climb() == cli.ENGINE_ERROR
    failed, _ = read(tmp_path)["rungs"]
    assert failed["status"] == "failed"
    assert "No module named 'no'" in failed["reason"]


def test_what_was_found_is_kept_as_it_comes(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a later rung, or counting, loses nothing of those before."""
    whole = Ladder.climb

    def stopped(ladder: Ladder, rung: Rung, least: Load | None) -> dict[str, Any]:
        if rung is not rungs.RUNGS[0]:
            raise SystemExit(9)
        return whole(ladder, rung, least)

    monkeypatch.setattr(Ladder, "climb", stopped)
    assert climb() == 9
    (row,) = read(tmp_path)["rungs"]
    assert (row["rung"], row["status"]) == ("loops", "equal")


@pytest.mark.parametrize(
    ("device", "file"),
    [
        ("NVIDIA H200", "x_h200.json"),
        ("NVIDIA H100 80GB HBM3", "x_h100-80gb-hbm3.json"),
    ],
)
def test_files_are_named_for_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, file: str
) -> None:
    """All but its maker counts."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    path = reports.write_json({}, "x", torch.device("cuda"), tmp_path)
    assert path == tmp_path / file


def test_a_plot_stands_beside(climb: Main, tmp_path: Path) -> None:
    """It is an image of all rungs that were timed."""
    assert climb("--only", "loops") == 0
    text = (tmp_path / "ladder_cpu.svg").read_text(encoding="utf-8")
    assert "<svg" in text and "loops" in text


def test_plots_can_be_done_without(
    climb: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without matplotlib the numbers are there, and a line says what is missing."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert climb("--only", "loops") == 0
    assert read(tmp_path)["rungs"]
    assert "no plot: " in capsys.readouterr().err


def test_a_checkout_is_asked_for(
    climb: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the package stands alone, one line says so."""
    monkeypatch.setattr(cli, "ROOT", tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    assert climb() == cli.USER_ERROR
    assert capsys.readouterr().err.startswith("error: the ladder needs a checkout")


def test_a_package_alone_hands_over_to_the_checkout_it_is_called_in(
    climb: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed is that checkout's package, whose commit is written down."""
    monkeypatch.setattr(cli, "ROOT", tmp_path / "installed")
    monkeypatch.setattr(Ladder, "__init__", None)
    monkeypatch.chdir(ROOT)
    # Even where Python is told not to look in the working folder.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert climb("--only", "batched products") == 0
    (row,) = read(tmp_path)["rungs"]
    assert (row["rung"], row["status"]) == ("batched products", "equal")


def test_a_checkout_out_of_sight_is_gone_to(
    climb: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is its own, but nothing beside it can be imported."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    monkeypatch.setattr(cli, "run_python", lambda root, *given: 77 * (root == ROOT))
    assert climb() == 77


def test_a_rung_named_twice_is_climbed_once(climb: Main, tmp_path: Path) -> None:
    """There is nothing to be told apart."""
    assert climb("--only", "loops", "--only", "loops") == 0
    assert [row["rung"] for row in read(tmp_path)["rungs"]] == ["loops"]


def test_unknown_rungs_are_refused(
    climb: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line lists those that there are."""
    assert climb("--only", "loop") == cli.USER_ERROR
    assert "no rung is called 'loop'" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_the_work(
    climb: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file is no folder; one line says so, and nothing was run."""
    monkeypatch.setattr(Ladder, "__init__", None)
    file = tmp_path / "file"
    file.touch()
    assert climb("--output", str(file)) == cli.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --output {file} cannot be a folder: ")
    assert line.endswith("; name another folder")


#: What a workload asks for too much of.
TOO_MUCH = {
    "--prompts": "error: no K/V block of ",
    "--prompt-tokens": "error: --prompt-tokens plus --new-tokens is 1000",
    "--new-tokens": "error: --prompt-tokens plus --new-tokens is 1000",
}


@pytest.mark.parametrize("option", TOO_MUCH)
def test_too_large_a_workload_is_told_in_the_ladders_own_options(
    option: str, climb: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """No option of an engine is named, of which the command has none."""
    assert climb("--prompt-tokens", "32", option, "100000") == cli.USER_ERROR
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(TOO_MUCH[option])
    assert not re.search("max_|memory_fraction", line)
    assert "lower --prompts" in line or "the model has only 4096 positions" in line


def test_models_that_there_can_be_are_named(
    climb: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a folder is missing, or what it should hold."""
    for model, cause in {
        "granite": "'granite' is not a folder; ",
        str(tmp_path): f"{tmp_path / 'config.json'} does not exist; ",
    }.items():
        assert climb("--model", model) == cli.USER_ERROR
        line = capsys.readouterr().err.splitlines()[-1]
        takes = "--model takes demo, granite-350m or a checkpoint folder"
        assert line.startswith(f"error: {cause}{takes}")


def test_no_run_takes_less_than_no_time(
    climb: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit below zero is refused."""
    assert climb("--seconds", "-1") == cli.USER_ERROR
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ("hybrid", []),
        ("attention", [6, 7, 8, 9, 16]),
        ("mamba", [5, 9, 16]),
        ("latent", []),
    ],
)
def test_a_rung_says_why_it_changes_nothing(model: str, idle: list[int]) -> None:
    """What is of layers that a model lacks is none of its business."""
    config = model_config(model)
    reasons = [why_idle(rung, config) for rung in rungs.RUNGS]
    assert [place for place, reason in enumerate(reasons) if reason] == idle
    kinds = {"attention": "Mamba-2", "mamba": "attention"}
    if idle:
        assert reasons[idle[0]] == f"the model has no {kinds[model]}"
        assert reasons[-1] == "the model has no mixture of experts"


def test_the_commit_is_that_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not of a repository in which somebody happens to be."""
    expected = environment(CPU, None)["commit"]
    monkeypatch.chdir(tmp_path)
    someone = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    commit = (*someone, "commit", "--quiet", "--allow-empty", "-m", "Another")
    for command in (("init", "--quiet"), commit):
        subprocess.run(["git", *command], check=True)
    found = environment(CPU, None)
    assert (found["commit"], "triton" in found) == (expected, True)


RESULTS = sorted((Path(rungs.__file__).parents[1] / "benchmarks/results").glob("*"))


each_result = pytest.mark.parametrize(
    "path",
    [path for path in RESULTS if path.match("ladder_*.json")],
    ids=lambda path: path.stem,
)


@each_result
def test_results_are_of_the_table_that_there_is(path: Path) -> None:
    """Every rung stands in a published result, in order, and none was unequal."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [row["rung"] for row in found["rungs"]] == [r.name for r in rungs.RUNGS]
    assert {r["status"] for r in found["rungs"]} <= {"equal", "not possible here"}
    assert path.with_suffix(".svg").exists()
    assert found["environment"]["commit"]


@each_result
def test_rates_follow_from_each_other(path: Path) -> None:
    """Those of all tokens, steps and the floor, from those of each kind of token."""
    found = json.loads(path.read_text(encoding="utf-8"))
    name, whole = found["model"], Load(**found["workload"])
    is_drawn = name == "granite-350m"
    fields = GRANITE_350M if is_drawn else read_config_files(find_folder(name))
    config = read_model_config(fields)
    made_of = count(config, getattr(torch, found["dtype"]).itemsize)
    for row in found["rungs"]:
        if row["status"] != "equal":
            continue
        load = Load(**row["measured"])
        speeds = [row[f"{kind}_tokens_per_second"] for kind in ("prefill", "decode")]
        computed = (
            load.prompts * load.prompt_tokens,
            load.prompts * (load.new_tokens - 1),
        )
        prefill, decode = (n / speed for n, speed in zip(computed, speeds, strict=True))
        workload = load.draw(0, config.vocab_size)
        floor = floor_of(made_of, workload, Rates(**found["rates"]))
        assert row["share_of_floor"] == pytest.approx(floor / (prefill + decode))
        steps = (load.new_tokens - 1) / decode
        assert row["decode_steps_per_second"] == pytest.approx(steps)
        parts = whole.prompt_tokens, whole.new_tokens - 1
        seconds = sum(n / speed for n, speed in zip(parts, speeds, strict=True))
        assert row["tokens_per_second"] == pytest.approx(sum(parts) / seconds)
        assert row["is_cut"] is (load != whole)


def test_rates_are_those_computed_by_hand() -> None:
    """A half that took 5 s: 8 tokens of prompts 4 s, two steps of 2 new tokens 1 s."""
    half, whole = Load(2, 4, 3), Load(2, 8, 5)
    served = Served(half, seconds={"prefill": 4.0, "decode": 1.0})
    served.tokens.update(prefill=8, decode=4)
    served.steps.update(prefill=1, decode=2)
    # One byte is read in each of three steps, at one byte a second.
    counts = Counts(1, *[0] * 10, num_bytes=1)
    rates = Rates(read=1.0, copy=1.0, flops=math.inf)
    found = serving.rate(served, whole, counts, 100, rates)
    assert found["is_cut"]
    assert found["prefill_tokens_per_second"] == 2
    assert found["decode_tokens_per_second"] == 4
    assert found["tokens_per_second"] == (8 + 4) / (8 / 2 + 4 / 4)
    assert found["decode_steps_per_second"] == 2
    assert found["share_of_floor"] == 3 / 5


def shown(found: dict[str, Any]) -> str:
    """Return the table that is printed."""
    console = Console(file=io.StringIO(), width=160)
    reports.show_ladder(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@each_result
def test_tables_say_of_what_counts_are(path: Path) -> None:
    """Of one step that decodes; what a file does not have is left out."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in found["rungs"] if "per_step" in row]
    steps = [row["per_step"]["decode"] for row in rows]
    rows_of_step = steps[0]["tokens"]
    for step in steps:
        step.pop("copies", None)
    assert "copies" not in shown(found)
    for step in steps:
        step["copies"] = 98765
    text = shown(found)
    assert f"host reads: of one step that decodes {rows_of_step} tokens" in text
    assert text.count("98,765") == len(rows)


# What it is made of.


def event(cat: str, name: str, **more: Any) -> dict[str, Any]:
    """Make an event of a trace."""
    return {"cat": cat, "name": name, "args": more}


GRAPH = [event("kernel", "gemm", correlation=7), event("kernel", "norm", correlation=7)]
COPIES = [
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", bytes=100),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", bytes=20),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", bytes=10),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", bytes=3),
    event("gpu_memset", "Memset (Device)", bytes=5),
    event("cuda_runtime", "cudaMemcpyAsync"),
]


@pytest.mark.parametrize(
    ("calls", "launches"),
    [
        ([event("cuda_runtime", "cudaGraphLaunch")], 1),
        ([event("cuda_runtime", "cudaLaunchKernelExC_v11060")] * 2, 2),
        ([event("cuda_driver", "cuLaunchKernelEx")] * 3, 3),
        ([], 1),
    ],
)
def test_launches_are_counted_by_call(calls: list[Any], launches: int) -> None:
    """A graph is one; copies, of which none within a device, are counted apart."""
    found = counting.summarize([*calls, *GRAPH, *COPIES])
    assert found == (launches, 2, 3, 130)


@pytest.mark.parametrize("events", [[], [*GRAPH, *COPIES]])
def test_what_a_profiler_sees_is_counted(
    monkeypatch: pytest.MonkeyPatch, events: list[Any]
) -> None:
    """On a GPU; one that sees no kernels is not believed to see copies."""
    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(counting, "profile", lambda activities: nullcontext(True))
    monkeypatch.setattr(counting, "read_trace", lambda _: events)
    with counting.counting(torch.device("cuda")) as counts:
        pass
    found = counts.launches, counts.kernels, counts.copies, counts.copied_bytes
    assert found == ((1, 2, 3, 130) if events else (None,) * 4)
    assert bool(counts.why_none) is not bool(events)


@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_reads_found_are_those_an_engine_reports(graphs: str) -> None:
    """From outside, a step of the optimized engine reads as often as it says."""
    engine = make_engine(model_config("hybrid"), "optimized", graphs=graphs, debug=())
    serving.add(engine, Load(2, 20, 3), seed=0)
    while engine.has_work:
        with counting.counting(CPU) as counts:
            record = engine.step()
        # Besides, all log-probabilities are recorded, but not read.
        assert counts.host_reads == record.host_reads == 1, counts.reads


@pytest.mark.parametrize(("limit", "kept"), [(math.inf, 64), (33.0, 32), (0.0, 4)])
def test_workloads_grow_until_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float, kept: int
) -> None:
    """No run is begun that would take longer, if twice as much takes twice as long."""
    load, seen = Load(1, 64, 16), list[int]()

    def serve(engine: Any, load: Load, seed: int = 0) -> Served:
        seen.append(load.prompt_tokens)
        return Served(load, seconds={"prefill": float(load.prompt_tokens)})

    monkeypatch.setattr(serving, "serve", serve)
    assert serving.serve_within(None, load, limit).load.prompt_tokens == kept
    assert seen[: seen.index(kept)] == sorted(set(seen) - {kept})
    assert seen.count(64) == (serving.RUNS + 1 if kept == 64 else 0)


def test_a_part_is_served_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No smaller one is tried."""
    load, seen = Load(1, 64, 16), set[int]()

    def serve(engine: Any, load: Load, seed: int = 0) -> Served:
        seen.add(load.prompt_tokens)
        return Served(load, seconds={"prefill": 100.0})

    monkeypatch.setattr(serving, "serve", serve)
    for least in (load.cut(4), load):
        seen.clear()
        assert serving.serve_within(None, load, 1.0, least).load == least
        assert seen == {least.prompt_tokens}


@pytest.mark.parametrize("compiled", [4, 16, 64])
def test_compiling_makes_no_workload_shorter(
    monkeypatch: pytest.MonkeyPatch, compiled: int
) -> None:
    """A first run at a size that takes long once is neither kept nor the end."""
    load, seen = Load(1, 64, 16), list[int]()

    def serve(engine: Any, load: Load, seed: int = 0) -> Served:
        seen.append(load.prompt_tokens)
        is_slow = load.prompt_tokens == compiled and seen.count(compiled) == 1
        return Served(load, seconds={"prefill": 100.0 if is_slow else 1.0})

    monkeypatch.setattr(serving, "serve", serve)
    served = serving.serve_within(None, load, limit=9.0)
    assert (served.load.prompt_tokens, served.total) == (64, 1.0)


@pytest.mark.parametrize(
    ("device", "threads", "clock"),
    [("cpu", 1, "process time"), ("cpu", 2, "wall time"), ("cuda", 1, "wall time")],
)
def test_others_on_the_machine_do_not_count(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int, clock: str
) -> None:
    """Where one thread does all the work, its own time is taken."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert serving.choose_clock(torch.device(device))[0] == clock


@pytest.mark.parametrize("name", [*SHAPES, "granite-350m"])
def test_floors_count_every_weight_once(name: str) -> None:
    """Matrices make up nearly all of a model; the embedding is no product."""
    config = read_model_config({**SHAPES, "granite-350m": GRANITE_350M}[name])
    counts = count(config)
    weights = counts.dense + counts.num_moe * counts.num_experts * counts.expert
    embeddings = 1 if config.tie_embeddings else 2
    counted = weights + embeddings * counts.head
    assert counted == pytest.approx(num_parameters(config), rel=SMALL_PARAMETERS)


def test_floors_follow_the_machine() -> None:
    """Half the rates take twice as long, and wider weights more than narrow ones."""
    config, workload = read_model_config(GRANITE_350M), Load(8, 64, 8).draw(0, 1000)
    slow = H200._replace(**{name: rate / 2 for name, rate in H200._asdict().items()})
    counts, wide = count(config), count(config, torch.float32.itemsize)
    assert floor_of(counts, workload, slow) == 2 * floor_of(counts, workload)
    assert floor_of(wide, workload) > floor_of(counts, workload)


def test_a_decode_scans_no_chunk() -> None:
    """A longer chunk is more work in a prompt, and none for a token by itself."""
    fields = GRANITE_350M | {"mamba_chunk_size": 128}
    half, whole = (count(read_model_config(each)) for each in (fields, GRANITE_350M))
    slow = H200._replace(flops=1.0)
    for num_tokens, is_equal in ((8, True), (64, False)):
        short, long = (
            step_seconds(each, num_tokens, 8, 512, 8, slow) for each in (half, whole)
        )
        assert (short == long) is is_equal
        assert short <= long


@pytest.mark.parametrize(
    ("name", "dtype", "is_known"),
    [
        ("NVIDIA H200", torch.bfloat16, True),
        ("NVIDIA H200", torch.float32, False),
        ("NVIDIA GH200 480GB", torch.bfloat16, False),
    ],
)
def test_rates_are_of_the_machine_and_the_dtype(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, is_known: bool
) -> None:
    """Those of one H200 in 16 bits are of nothing else, for which they are measured."""
    measured = H200._replace(flops=1.0)
    monkeypatch.setattr(rooflines, "measure_rates", lambda *given: measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    rates = choose_rates(torch.device("cuda"), dtype)
    assert rates == (H200 if is_known else measured)


def test_a_gpu_reads_more_than_its_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is measured is the cache, or how long a kernel takes to start."""
    shapes: list[tuple[int, ...]] = []

    def ones(*shape: int, **_: Any) -> Tensor:
        shapes.append(shape)
        return torch.empty(shape, device="meta")

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(rooflines, "_best_seconds", lambda *_: 1.0)
    rates = rooflines.measure_rates(torch.device("cuda"), torch.bfloat16)
    assert rates.read == 4 * math.prod(shapes[-1])
    assert 2 * math.prod(shapes[-1]) > ROTATED
