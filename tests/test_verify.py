"""The verifier passes equal engines, and names what is wrong with others."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from lockstep import SamplingParams, cli
from lockstep.batch import BatchMetadata
from lockstep.errors import ConfigError
from lockstep.verify import Arrival, Difference, Verdict, Workload, run, show, verify
from scripts.scenes import MODELS, Disturbed, scenes
from tests.engines import greedy
from tests.factories import load

ROOT = Path(__file__).resolve().parents[1]
#: Whose components are replaced where `side` is asked for: both.
MODULE = "engine"
TINY = MODELS["witness"]
#: A prompt that is cut, one that shares its first block, and the first one's next turn.
SHORT = Workload(
    [
        Arrival([*range(40)], greedy(9, logprobs=2)),
        Arrival([*range(16), 9, 9, 9], greedy(20), step=4),
        Arrival([5, 6, 7], greedy(4, prompt_logprobs=1), after=0),
        Arrival([8, 8, 8], SamplingParams(temperature=1.0, max_tokens=3, seed=1)),
    ],
    {"max_tokens_per_step": 24},
)


def judge(side: str, key: str, part: Any, **options: Any) -> Verdict:
    """Put a component into an engine of a side, and compare with the reference."""
    return verify(side, {key: part}, workload=SHORT, model=TINY, **options)


# Faults. Each takes the part of a side and returns a wrong one.


def slow_state(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave states a little too large."""

    def faulty(tokens: Any, a: Any, b: Any, states: Tensor, batch: Any) -> Tensor:
        y = scan(tokens, a, b, states, batch)
        states[batch.decode_slot_ids] *= 1.001
        return y

    return faulty


def late_window(conv: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave the window one token late."""

    def faulty(inputs: Any, a: Any, b: Any, states: Tensor, batch: Any) -> Tensor:
        outputs = conv(inputs, a, b, states, batch)
        slots = batch.prefill_slot_ids
        states[slots] = states[slots].roll(1, -1)
        return outputs

    return faulty


def wrong_place(append: Callable[..., None]) -> Callable[..., None]:
    """Write values, not keys, one place early."""

    def faulty(keys: Any, values: Any, to: Any, into: Tensor, index: Tensor) -> None:
        append(keys, values, to, into.clone(), index)
        append(keys, values, to.clone(), into, index - (index % 16 == 5).long())

    return faulty


def wrong_block(pool: Any) -> Any:
    """Match blocks in the wrong order."""

    class Faulty(pool):
        def match(self, *arguments: Any) -> list[int]:
            return [max(0, block - 1) for block in super().match(*arguments)]

    return Faulty


def wrong_slot(slots: Any) -> Any:
    """Find another snapshot than the one asked for."""

    class Faulty(slots):
        def lookup(self, *arguments: Any) -> int | None:
            found = super().lookup(*arguments)
            return found and found + 1

    return Faulty


def wrong_copy(copy_states: Callable[..., None]) -> Callable[..., None]:
    """Copy states into the slot before."""

    def faulty(caches: Any, sources: Tensor, targets: Tensor, dummy: int) -> None:
        copy_states(caches, sources, targets - (targets != dummy).long(), dummy)

    return faulty


def wrong_token(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Draw the token after."""
    return lambda logits, draws: (sample(logits, draws) + 1) % logits.shape[1]


def wrong_weights(route: Callable[..., Any]) -> Callable[..., Any]:
    """Give each expert another's weight."""

    def faulty(*arguments: Any) -> Any:
        ids, weights = route(*arguments)
        return ids, weights.flip(1)

    return faulty


def wrong_experts(route: Callable[..., Any]) -> Callable[..., Any]:
    """Visit the experts of the token before."""

    def faulty(*arguments: Any) -> Any:
        ids, weights = route(*arguments)
        return ids.roll(1, 0), weights

    return faulty


def wrong_starts(builder: Any) -> Any:
    """Start every row from the slot that it writes."""

    class Faulty(builder):
        def build(self, *arguments: Any) -> BatchMetadata:
            batch = super().build(*arguments)
            return replace(batch, initial_slot_ids=batch.prefill_slot_ids)

    return Faulty


def broken(_: Any) -> Callable[..., Any]:
    """Fail."""

    def faulty(*_: Any) -> Any:
        raise ValueError("no such thing")

    return faulty


#: Which part is broken, how, and what must be named.
FAULTS: dict[str, tuple[str, Any, Difference]] = {
    "a state too large": (
        "scan.scan_decode",
        slow_state,
        Difference("scan.scan_decode", "ssm_states", "", 0, "r0", 41, 3),
    ),
    "a window late": (
        "conv1d.conv_prefill",
        late_window,
        Difference("conv1d.conv_prefill", "conv_states", "", 0, "r0", 16, 1),
    ),
    "values at the wrong place": (
        "attention.append_kv",
        wrong_place,
        Difference("attention.append_kv", "value_blocks", "", 1, "r0", 4, 1),
    ),
    "another block reused": (
        "kv_blocks.BlockPool",
        wrong_block,
        Difference(
            "scheduler.Scheduler", "own plan.rows.block_table", "", None, "r2", None, 11
        ),
    ),
    "another snapshot restored": (
        "state_slots.StateSlots",
        wrong_slot,
        Difference(
            "scheduler.Scheduler",
            "own plan.rows.initial_slot_id",
            "",
            None,
            "r1",
            None,
            4,
        ),
    ),
    "a copy in another slot": (
        "snapshots.copy_states",
        wrong_copy,
        Difference("snapshots.copy_states", "conv_states", "", 0, "", None, 10),
    ),
    "another token": (
        "sampler.sample",
        wrong_token,
        Difference("sampler.sample", "token_ids", "", None, "r0", 39, 2),
    ),
    "weights exchanged": (
        "moe.route",
        wrong_weights,
        Difference("moe.route", "expert_weights", "", 3, "r0", 0, 1),
    ),
    "another token's experts": (
        "moe.route",
        wrong_experts,
        Difference("moe.route", "expert_ids", "", 3, "r0", 3, 1),
    ),
    "rows that start from their own slot": (
        "metadata.MetadataBuilder",
        wrong_starts,
        Difference(
            "metadata.MetadataBuilder", "initial_slot_ids", "", None, "", None, 1
        ),
    ),
    "an exception": (
        "norm.gated_group_rms_norm",
        broken,
        Difference("norm.gated_group_rms_norm", "exception", "", 0, "", None, 1),
    ),
}


#: What a scene makes happen, so that both engines are seen to do it alike.
HAPPENS = {
    "crowd": ["decode and prefill steps", "restores", "snapshots", "evicted states"],
    "short states": ["decode and prefill steps", "snapshots"],
    "family": ["deferred", "restores", "evicted states"],
    "faults": ["preempted", "failed", "interrupted"],
    "variants": ["deferred", "aborted", "evicted blocks"],
    "no states": ["restores"],
    "growing": ("preempted", "restores", "evicted states"),
    "overtaken": ("decode and prefill steps", "evicted blocks"),
}


def part_of(side: str, key: str) -> Any:
    """Find a component of a side."""
    module, name = key.split(".")
    return getattr(load(side, module), name)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_blamed(side: str, fault: str) -> None:
    """Step, layer, operation, tensor, request and position; and the part at fault."""
    key, break_it, expected = FAULTS[fault]
    verdict = judge(side, key, break_it(part_of(side, key)))
    found = verdict.difference
    assert found is not None
    assert replace(found, details="", blame="") == expected
    assert found.blame == key
    assert found.details


def test_two_faults_are_blamed_on_nobody_alone() -> None:
    """Where no replacement helps, the first difference is all that is said."""
    parts = {
        key: FAULTS[name][1](part_of("reference", key))
        for key, name in (
            ("conv1d.conv_prefill", "a window late"),
            ("moe.route", "weights exchanged"),
        )
    }
    found = verify("reference", parts, workload=SHORT, model=TINY).difference
    assert found is not None
    assert (found.operation, found.blame) == ("conv1d.conv_prefill", "")


def test_the_engine_itself_can_be_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """No component helps, but the other side's engine with the same components does."""
    engine = load("optimized", "engine").Engine
    commit = engine._commit

    def twice(self: Any, plan: Any, record: Any) -> None:
        commit(self, plan, record)
        record.stored_states = [*record.stored_states, b"never"]

    monkeypatch.setattr(engine, "_commit", twice)
    found = verify("optimized", workload=SHORT, model=TINY).difference
    assert found is not None
    assert (found.tensor, found.blame) == ("stored_states", "engine.Engine")


@pytest.mark.parametrize("name", scenes())
def test_both_backends_are_equal(name: str) -> None:
    """Every scene passes: from the same state each step, padded, and running freely."""
    scene = scenes()[name]
    given: Any = {"workload": scene.workload, "model": MODELS[scene.model]}
    ways: tuple[dict[str, Any], ...] = {"graphs": "padded"}, {"free_running": True}
    for options in ways:
        verdict = verify("optimized", **given, **options)
        assert verdict.equal, verdict
        assert bool(verdict.events["padded steps"]) == ("graphs" in options)
        assert set(HAPPENS[name]) <= set(verdict.events), verdict.events


def python(*arguments: str) -> tuple[int, str]:
    """Run Python in the checkout, without checks of shapes; return status and text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_the_reference_equals_itself_by_the_bit() -> None:
    """Nothing is lost between the engines, for any model."""
    for model in (*MODELS.values(), replace(TINY, dtype="bfloat16")):
        verdict = verify("reference", workload=SHORT, model=model, bitwise=True)
        assert verdict.equal, verdict
        assert not any(verdict.errors.values())


def test_bits_differ_between_backends() -> None:
    """What passes within the budgets does not by the bit."""
    assert verify("optimized", workload=SHORT, model=TINY).equal
    assert not verify("optimized", workload=SHORT, model=TINY, bitwise=True).equal


def test_errors_add_up_when_running_freely() -> None:
    """An error that one step may have is too much after many."""
    scan = part_of("reference", "scan.scan_decode")

    def drifting(tokens: Any, a: Any, b: Any, states: Tensor, batch: Any) -> Tensor:
        y = scan(tokens, a, b, states, batch)
        states[batch.decode_slot_ids] *= 1 + 6e-6
        return y

    verdict = judge("reference", "scan.scan_decode", drifting)
    assert verdict.equal, verdict
    found = judge("reference", "scan.scan_decode", drifting, free_running=True)
    assert found.difference is not None
    assert found.difference.step > 3


def test_ties_are_counted_and_reported() -> None:
    """Of two tokens with equal logits, rounding may choose; a wrong choice may not."""
    linear = part_of("reference", "linear.linear")
    vocab = TINY.vocab_size

    def rounding(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = linear(inputs, weight, bias)
        if len(weight) == vocab:
            outputs[:, vocab // 2 : vocab - 1] *= 1 + 1e-6
        return outputs

    verdict = judge("reference", "linear.linear", rounding)
    assert verdict.equal, verdict
    assert verdict.ties
    assert all("sampler.sample" in tie for tie in verdict.ties)


def test_truth_is_as_far_as_rounding_takes() -> None:
    """Each layer has a small error; one that rounds to bfloat16 a larger one."""
    verdict = verify("optimized", workload=SHORT, model=TINY, truth=True)
    layers = [layer.partition(", ")[2] for layer in verdict.truth]
    assert layers == ["Mamba-2", "attention", "MLP", "experts", "Mamba-2"]
    unit = 2.0**-24
    for errors in verdict.truth.values():
        for error in errors:
            assert unit / 10 < error < 100 * unit
    linear = part_of("reference", "linear.linear")

    def coarse(*arguments: Any) -> Tensor:
        return linear(*arguments).bfloat16().float()

    rough = judge("reference", "linear.linear", coarse, truth=True)
    assert not rough.equal
    for oracle, subject in rough.truth.values():
        assert subject > 100 * oracle


def test_a_disturbed_run_is_still_equal() -> None:
    """An exception and an abort within a step happen to both sides alike."""
    within = {3: ("rms_norm", ""), 8: ("sample", "r1")}
    disturbed = replace(SHORT, before=Disturbed({9: "r0"}, within))
    verdict = verify("optimized", workload=disturbed, model=TINY)
    assert verdict.equal, verdict
    assert verdict.events["aborted"] == 1
    assert verdict.events["interrupted"]


def test_any_model_and_prompts_of_ones_own() -> None:
    """The packaged model, and a workload in one line."""
    prompts = [Arrival([*range(40)], greedy(3)), Arrival([*range(20)], greedy(3))]
    verdict = verify("optimized", workload=Workload(prompts, {"num_blocks": 8}))
    assert verdict.equal, verdict
    assert verdict.events["finished"] == 2


def test_a_refused_request_is_refused_by_both() -> None:
    """What is too long is answered alike, and those that wait for it go on."""
    workload = Workload(
        [Arrival([*range(200)]), Arrival([1, 2], after=0), Arrival([3])]
    )
    verdict = verify("optimized", workload=workload, model=TINY)
    assert verdict.equal, verdict
    assert verdict.events["finished"] == 2


def test_unknown_parts_are_refused() -> None:
    """A misspelt component or option is an error, not an equal engine."""
    with pytest.raises(ConfigError, match="unknown components"):
        verify("reference", {"scan.scan": None})
    with pytest.raises(ConfigError, match="unknown option"):
        verify("reference", blocks=3)
    with pytest.raises(ConfigError, match="option of the optimized backend"):
        verify("reference", graphs="padded")


# What a user sees.


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `lockstep verify` within this process on few tokens."""
    few = [Arrival([*range(20)], greedy(2))]
    monkeypatch.setattr(run, "draw_arrivals", lambda *_, **__: few)
    monkeypatch.setattr(sys, "argv", ["lockstep", "verify", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal engines end well, and others do not; the difference is named."""
    assert command(monkeypatch, "demo", "--free-running", "--truth") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "optimized equals reference" in shown
    assert "layer 10, experts" in shown
    assert command(monkeypatch, "--component", "scan.x=reference") == 2
    assert "unknown components ['scan.x']" in capsys.readouterr().err
    part = "conv1d.conv_prefill=tests.test_verify:window_of_zeros"
    assert command(monkeypatch, "--component", part) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "step 1, layer 0, conv1d.conv_prefill, conv_states, r0, position" in shown
    assert "to blame: conv1d.conv_prefill" in shown


def window_of_zeros(inputs: Any, a: Any, b: Any, states: Tensor, batch: Any) -> Tensor:
    """Convolve, and leave no window."""
    outputs = part_of("optimized", "conv1d.conv_prefill")(inputs, a, b, states, batch)
    states[batch.prefill_slot_ids] = 0
    return outputs


def test_a_verdict_fits_a_screen() -> None:
    """All that was found, in 24 lines of 80 characters."""
    verdict = verify("optimized", workload=SHORT, model=TINY, truth=True)
    console = Console(width=80, record=True, file=io.StringIO())
    show(verdict, console)
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    for word in ("oracle", "subject", "roundoffs", "ties", "float64"):
        assert any(word in line for line in lines), word


def test_mutants_need_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An installed package looks for one in the working folder, and says so."""
    monkeypatch.setattr(cli, "ROOT", tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    message = f"--mutant needs a checkout, and {re.escape(str(tmp_path))} is none"
    with pytest.raises(ConfigError, match=message):
        cli.judge_mutant("M1")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "run_python", lambda *given: given)
    script = str(ROOT / "scripts" / "verify_mutants.py")
    assert cli.judge_mutant("M1") == (ROOT, script, "M1")


#: Known faults of each kind of file: what must be named first, and blamed.
MUTANTS = {
    "M1": ("metadata.MetadataBuilder, snapshot_scan_chunks", "metadata."),
    "M6": ("snapshots.copy_states, ssm_states", "snapshots.copy_states"),
    "M15": ("own plan.rows.end", "lockstep/policy.py"),
    "M25": ("answers, plans", "kv_blocks.BlockPool"),
    "M40": ("scan.scan_prefill, outputs", "scan.scan_prefill"),
    "M62": ("engine.Engine, interrupted", "metadata.MetadataBuilder"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_fault_is_found(name: str) -> None:
    """Whatever file it is in: a side's, or one that both share."""
    where, blame = MUTANTS[name]
    found = report_on(name)
    assert where in found["where"], found
    assert found["blame"].startswith(blame), found


def report_on(name: str) -> dict[str, str]:
    """Run the script on a known fault."""
    status, shown = python("scripts/verify_mutants.py", name, "--json")
    assert status == 0, shown
    return json.loads(shown)


def test_a_fault_outside_of_engines_is_said_to_be_that() -> None:
    """Text is made where there is no step to compare."""
    found = report_on("M63")
    assert not found["where"]
    assert "outside of engines" in found["note"]


def test_one_fault_from_the_command_line() -> None:
    """It is shown like any verdict, with its status; an unknown one is an error."""
    status, shown = python("-m", "lockstep", "verify", "--mutant", "M2")
    assert status == 1
    assert "prefill leaves the window after the activation" in shown
    assert "to blame: conv1d.conv_prefill" in shown
    status, shown = python("-m", "lockstep", "verify", "--mutant", "M0")
    assert status == 2
    assert "no mutant is named 'M0'" in shown


@pytest.mark.parametrize(
    "given",
    [
        "nosuch",
        "--truth",
        "--device cuda",
        "--component a.b=c:d",
        "--backend reference",
    ],
)
def test_a_known_fault_goes_by_itself(given: str) -> None:
    """No option is passed over in silence."""
    with pytest.raises(ConfigError, match="--mutant goes by itself"):
        cli.app(["verify", *given.split(), "--mutant", "M2"], standalone_mode=False)


def test_the_example_finds_its_fault() -> None:
    """The right component passes, the faulty one is caught."""
    for form in (
        ("examples/verify_component.py",),
        ("-m", "examples.verify_component"),
    ):
        status, shown = python(*form)
        assert status == 0, shown
        assert "=scan_decode equals reference" in shown
        assert "=faulty_scan_decode differs from reference" in shown
        assert "to blame: scan.scan_decode" in shown
