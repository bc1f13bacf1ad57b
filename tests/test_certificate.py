"""Certificates: what passes, what fails and how, and what is said of transformers."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto import modeling_auto
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridTopKRouter,
)

from lockstep import cli
from lockstep.assemble import BACKENDS
from lockstep.errors import CheckpointError, ConfigError
from lockstep.families import read_config_files, read_model_config
from lockstep.verify import Certificate, certificate, certify
from lockstep.verify.certificate import (
    NEW_TOKENS,
    TABLES,
    WAYS,
    Result,
    _faults,
    find_commit,
)
from lockstep.verify.compare import COARSEST
from lockstep.verify.library import Library, mamba_layers
from scripts.certificates import save_rounded
from tests import checkpoints
from tests.checkpoints import BASES, edit_config, save
from tests.factories import CPU, load
from tests.tolerances import WITNESS_FACTOR

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "certificates"
HYBRIDS = ("nemotron_h", "bamba", "granitemoehybrid", "mamba2")


def tiny(folder: Path, family: str = "nemotron_h", **fields: Any) -> Path:
    """Save a tiny checkpoint; of a hybrid, one layer of each kind is enough."""
    if family == "nemotron_h":
        fields = {"hybrid_override_pattern": "M*-", **fields}
    return save(folder / "tiny", {"model_type": family, **fields})


def oracle(folder: Path, family: str = "nemotron_h", **fields: Any) -> Any:
    """Load a tiny checkpoint as transformers does by itself."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny(folder, family, **fields))
    return model.eval()


def library(folder: Path) -> Library:
    """Load a checkpoint as certificates do."""
    config = read_model_config(read_config_files(folder))
    return Library(folder, config, CPU, "float32")


def ids(count: int) -> Tensor:
    """Draw a text."""
    vocab, draw = BASES["nemotron_h"]["vocab_size"], torch.Generator().manual_seed(0)
    return torch.randint(vocab, (1, count), generator=draw)


# Certificates.


def test_a_family_passes_every_way(tmp_path: Path) -> None:
    """All that a CPU can run happens, is equal, and is on the page and in the JSON."""
    made = certify(tiny(tmp_path), commit="abc")
    assert made.passed, made
    content = made.content
    for result in content["results"]:
        if result["way"] == "graphed":
            assert result["skipped"] == "not run: needs a GPU"
            continue
        assert result["worst"] <= content["bound"]
        assert result["equal_tokens"] == result["tokens"] > 0
        # Three engines, three numbers: none is further from two than they are apart.
        gap = result["from_float64"]
        assert 0 < gap <= result["worst"] + content["rounding"]
        for need in WAYS[result["way"]].needs:
            assert result["events"][need] > 0
        assert f"| {result['way']} | {result['backend']} | " in made.page
    tried = {(each["way"], each["backend"]) for each in content["results"]}
    assert {way for way, _ in tried} == set(WAYS)
    assert {("cold", "reference"), ("warm", "reference")} <= tried
    assert content["not_run"] == {"graphed": ["optimized"]}
    assert "**Not tried**: graphed (optimized)." in made.page
    # More than there are, of which the page tells why.
    (again,) = {e["positions"] for e in content["results"] if e["way"] == "preempted"}
    assert again > sum(length + NEW_TOKENS - 1 for length in content["prompts"])
    assert "after it was preempted, is compared and counted again" in made.page
    page = made.write(tmp_path / "out")
    assert page.read_text() == made.page
    read = Certificate(json.loads(page.with_suffix(".json").read_text()))
    assert read.page == made.page
    assert read.content["versions"]["commit"] == "abc"
    assert str(made).startswith("PASS tiny: ")


def test_a_page_says_what_was_compared_and_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files by their hashes, devices by name; and what did not run."""
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    folder = tiny(tmp_path, "llama")
    made = certify(folder, ways=["cold"], backends=["optimized"])
    content = made.content
    assert content["files"] == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }
    where = dict.fromkeys(("optimized", "transformers"), "CPU, abacus")
    assert content["devices"] == where
    assert "engine: cold (optimized).\n" in made.page
    others = "warm (reference, optimized), chunked (reference, optimized)"
    assert f"**Not tried**: cold (reference), {others}, " in made.page
    assert "both" not in made.page.partition("| | |")[0].lower()
    assert "**not Lockstep" not in made.page


def test_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch names it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Z on {device}")
    assert certificate._describe(torch.device("cuda:1")) == "Z on cuda:1"


def test_versions_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of what transformers may compute with, too, or that it is not there."""

    def found(name: str) -> str:
        if name == "causal-conv1d":
            raise PackageNotFoundError(name)
        return f"9 of {name}"

    monkeypatch.setattr(certificate, "version", found)
    made = certify(tiny(tmp_path, "llama"), ways=["cold"], backends=["optimized"])
    for line in (
        "| transformers | 9 of transformers |",
        "| mamba-ssm | 9 of mamba-ssm |",
        "| causal-conv1d | not installed |",
    ):
        assert f"{line}\n" in made.page


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not that of the current folder, nor of a checkout that it is installed below."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.check_output(command, text=True).strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--no-gpg-sign", "--message", "m")
    commit = git("rev-parse", "HEAD")
    path = Path("lockstep/verify/certificate.py")
    monkeypatch.setattr(certificate, "_HERE", tmp_path / path)
    monkeypatch.chdir(ROOT)
    folder = tiny(tmp_path, "llama")
    made = certify(folder, ways=["cold"], backends=["optimized"])
    assert made.content["versions"]["commit"] == commit
    (tmp_path / "installed").mkdir()
    monkeypatch.setattr(certificate, "_HERE", tmp_path / "installed" / path)
    monkeypatch.chdir(tmp_path)
    assert find_commit() == ""


def test_replaced_components_are_named(tmp_path: Path) -> None:
    """A page on other parts than Lockstep's own says so, passed or not."""
    folder = tiny(tmp_path)
    parts = {
        "norm.rms_norm": "optimized",
        "scan.scan_decode": "examples.verify_component:scan_decode",
        "scan.scan_prefill": part("optimized", "scan.scan_prefill"),
    }
    made = certify(folder, parts, backends=["optimized"], ways=["cold"])
    assert made.passed, made
    function = "lockstep.optimized.scan:scan_prefill"
    named = {**parts, "scan.scan_prefill": function}
    assert made.content["components"] == named
    assert made.page.startswith("# tiny, parts replaced: PASS\n")
    for key, name in named.items():
        assert f"\n* `{key}` by `{name}`\n" in made.page
    assert str(made).startswith("PASS tiny with another norm.rms_norm and scan.")


def test_a_warm_result_is_of_restored_texts(tmp_path: Path) -> None:
    """Texts too short to be restored are not compared; others are, from there on."""
    made = certify(tiny(tmp_path), ways=["warm", "padded"], backends=["optimized"])
    warm, padded = made.content["results"]
    block = made.content["block"]
    assert min(made.content["prompts"]) < block - NEW_TOKENS < min(warm["restored"])
    assert warm["prompt"] in warm["restored"]
    lengths = [length + NEW_TOKENS - 1 for length in warm["restored"]]
    assert warm["positions"] < sum(lengths)
    assert (sum(lengths) - warm["positions"]) % block == 0
    # Where others are compared, too, the page says which were restored.
    assert padded["events"]["restores"] == len(padded["restored"]) > 0
    for result in (warm, padded):
        numbers = ", ".join(map(str, result["restored"]))
        assert f"; restored: prompts of {numbers} |\n" in made.page


def test_attention_alone_passes(tmp_path: Path) -> None:
    """A model without states has none to restore."""
    made = certify(tiny(tmp_path, "qwen3"), ways=["warm", "padded"])
    assert made.passed, made
    for result in made.content["results"]:
        assert "restored states" not in result["events"]


def test_a_narrow_dtype_is_judged_by_its_own_rounding(tmp_path: Path) -> None:
    """Both run in it; what transformers loses there is allowed."""
    folder = tiny(tmp_path, "llama")
    narrow = certify(folder, ways=["cold"], dtype="float16")
    assert narrow.passed, narrow
    wide = certify(folder, ways=["cold"])
    assert narrow.content["bound"] > wide.content["bound"]


def test_a_bound_that_allows_for_much_is_no_pass() -> None:
    """In bfloat16 the demo model's tokens go to other experts, and much is allowed."""
    made = certify(ways=["cold"], backends=["optimized"], dtype="bfloat16")
    assert not made.content["failures"] and not made.passed
    assert made.content["bound"] > COARSEST
    assert made.content["verdict"] == "TOO COARSE"
    assert made.page.startswith("# demo: TOO COARSE\n")
    assert "**little is proven**" in made.page and "float32 tells more" in str(made)


def without_skip(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave ``D`` out."""

    def faulty(tokens: Any, parameters: Any, *others: Any) -> Tensor:
        return scan(tokens, replace(parameters, D=parameters.D * 0), *others)

    return faulty


def lost_state(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Begin every prompt from nothing, whatever is restored."""

    def faulty(tokens: Any, a: Any, b: Any, states: Tensor, batch: Any) -> Tensor:
        states[batch.initial_slot_ids] = 0
        return scan(tokens, a, b, states, batch)

    return faulty


def part(side: str, key: str) -> Any:
    """Find a component of a side."""
    module, name = key.split(".")
    return getattr(load(side, module), name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scan_without_skip_fails(backend: str, tmp_path: Path) -> None:
    """Every way that scans prompts fails, and the worst position is named."""
    parts = {"scan.scan_prefill": without_skip(part(backend, "scan.scan_prefill"))}
    made = certify(tiny(tmp_path), parts, backends=[backend], ways=["cold", "chunked"])
    assert not made.passed
    assert len(made.content["failures"]) == 2
    for way, text in zip(("cold", "chunked"), made.content["failures"], strict=True):
        (result,) = (e for e in made.content["results"] if e["way"] == way)
        assert text.startswith(f"{way}, {backend}: differs by ")
        where = f"position {result['position']} of the prompt of {result['prompt']}"
        assert where in text
    assert "**FAIL**" in made.page
    assert str(made).startswith("FAIL cold, ")


def test_a_lost_state_fails_where_it_is_restored(tmp_path: Path) -> None:
    """The cold way passes, the warm one does not, from the restored position on."""
    parts = {"scan.scan_prefill": lost_state(part("optimized", "scan.scan_prefill"))}
    ways = ["cold", "warm"]
    made = certify(tiny(tmp_path), parts, backends=["optimized"], ways=ways)
    (failure,) = made.content["failures"]
    assert failure.startswith("warm, optimized: differs by ")


def test_a_way_that_nothing_happened_in_fails(tmp_path: Path) -> None:
    """A cache that never gives anything back is not certified."""
    cache = part("optimized", "prefix_cache.PrefixCache")

    class Forgetful(cache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments[:-1], False)

    parts = {"prefix_cache.PrefixCache": Forgetful}
    made = certify(tiny(tmp_path), parts, backends=["optimized"], ways=["warm"])
    (failure,) = made.content["failures"]
    assert failure == "warm, optimized: there were no restores and no restored states"


def done(way: str) -> Result:
    """Make the result of a way in which all that it needs happened."""
    result = Result(way, "optimized", 0.0, positions=1, tokens=1, equal_tokens=1)
    result.events = dict.fromkeys(WAYS[way].needs, 1)
    return result


@pytest.mark.parametrize("way", WAYS)
def test_a_way_needs_all_that_it_says(way: str) -> None:
    """Each of its events, none that would make it another way, and positions."""
    result = done(way)
    result.judge(WAYS[way], 1.0)
    assert not result.fault
    for need in WAYS[way].needs:
        result = done(way)
        del result.events[need]
        result.judge(WAYS[way], 1.0)
        assert result.fault == f"there were no {need}"
    for bar in WAYS[way].bars:
        result = done(way)
        result.events[bar] = 1
        result.judge(WAYS[way], 1.0)
        assert result.fault == f"there were {bar}"
    for field, value in {"positions": 0, "missed": 2}.items():
        result = done(way)
        setattr(result, field, value)
        result.judge(WAYS[way], 1.0)
        assert result.fault.endswith(("nothing was compared", "were not compared"))


def test_words_of_ways_are_needs() -> None:
    """What is said of a way must have happened."""
    words = {
        "several at once": "shared steps",
        "some restored": "restores",
        "cut": "continued prompts",
        "all then decoded": "decode steps",
        "token by token": "decode steps",
        "padded": "padded steps",
        "preempt": "preempted",
        "CUDA graph": "replayed graphs",
    }
    for way in WAYS.values():
        assert {need for word, need in words.items() if word in way.about} <= {
            *way.needs
        }
    same = {*WAYS["padded"].needs} - {"padded steps"} | {"replayed graphs"}
    assert {*WAYS["graphed"].needs} == same
    for way in ("padded", "graphed"):
        assert WAYS[way].bars == ["eager steps"]


def test_an_eager_step_among_padded_ones_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One is enough."""
    runner = load("optimized", "graphs").GraphRunner
    run, left = runner.run, [1]

    def eager_once(self: Any, batch: Any) -> Any:
        forward = run(self, batch)
        is_first = not batch.shape.prefill_requests and left and left.pop()
        return forward._replace(mode="eager") if is_first else forward

    monkeypatch.setattr(runner, "run", eager_once)
    made = certify(tiny(tmp_path), ways=["padded"])
    assert made.content["failures"] == ["padded, optimized: there were eager steps"]
    assert made.content["results"][0]["events"]["eager steps"] == 1
    # The reference has no such way, so it ran nowhere.
    assert {*made.content["devices"]} == {"optimized", "transformers"}


def test_positions_that_are_left_out_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every position of every text must be compared."""
    engine = load("reference", "engine").Engine
    split = engine._split_logprobs

    def short(self: Any, *given: Any) -> dict[str, Tensor]:
        return {name: rows[:-1] for name, rows in split(self, *given).items()}

    monkeypatch.setattr(engine, "_split_logprobs", short)
    folder = tiny(tmp_path, "llama")
    made = certify(folder, ways=["cold"], backends=["reference"])
    (failure,) = made.content["failures"]
    count = len(made.content["prompts"])
    assert failure == f"cold, reference: {count} positions were not compared"


def test_another_token_fails(tmp_path: Path) -> None:
    """Log-probabilities of others' tokens are no tie."""
    swap = part("reference", "sampler.log_probabilities")

    def faulty(logits: Tensor) -> Tensor:
        return swap(logits).flip(1)

    parts = {"sampler.log_probabilities": faulty}
    made = certify(tiny(tmp_path), parts, backends=["reference"], ways=["cold"])
    (result,) = made.content["results"]
    assert result["equal_tokens"] + result["ties"] < result["tokens"]
    assert not made.passed


def test_what_is_no_number_fails(tmp_path: Path) -> None:
    """NaN is larger than any bound."""
    real = part("optimized", "sampler.log_probabilities")

    def faulty(logits: Tensor) -> Tensor:
        return real(logits).index_fill(0, torch.tensor([0]), torch.nan)

    parts = {"sampler.log_probabilities": faulty}
    made = certify(tiny(tmp_path), parts, backends=["optimized"], ways=["cold"])
    (failure,) = made.content["failures"]
    assert failure.startswith("cold, optimized: differs by inf at position 0 ")


def test_an_exception_fails(tmp_path: Path) -> None:
    """What an engine ends requests with is the reason."""

    def broken(*_: Any) -> Any:
        raise ValueError("no such thing")

    parts = {"mlp.activate": broken}
    made = certify(tiny(tmp_path), parts, backends=["reference"], ways=["cold"])
    assert "cold, reference: ValueError: no such thing" in made.content["failures"]


def test_nothing_is_certified_by_nothing(tmp_path: Path) -> None:
    """A way that this machine cannot run is not passed by itself."""
    made = certify(tiny(tmp_path, "llama"), backends=["optimized"], ways=["graphed"])
    assert made.content["failures"] == ["nothing was compared"]
    assert str(made) == "FAIL nothing was compared"


def test_nothing_is_certified_by_what_is_no_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the library overflows, no difference is small."""
    logprobs = Library.logprobs

    def overflowed(model: Library, token_ids: list[int]) -> Tensor:
        return logprobs(model, token_ids) + math.nan

    monkeypatch.setattr(Library, "logprobs", overflowed)
    made = certify(tiny(tmp_path, "llama"), backends=["optimized"], ways=["cold"])
    assert any("are no numbers" in each for each in made.content["failures"])


@pytest.mark.parametrize("given", [{"ways": ["hot"]}, {"backends": ["fast"]}])
def test_unknown_ways_are_refused(given: dict[str, Any]) -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match="there is no '(hot|fast)'; known are"):
        certify("demo", **given)


def test_a_model_of_too_few_positions_is_refused(tmp_path: Path) -> None:
    """The error counts them, and one more does."""
    folder = tiny(tmp_path, "llama", max_position_embeddings=NEW_TOKENS)
    message = f"has {NEW_TOKENS} positions; a certificate needs {NEW_TOKENS + 1}, "
    with pytest.raises(ConfigError, match=message):
        certify(folder)
    edit_config(folder, max_position_embeddings=NEW_TOKENS + 1)
    assert certify(folder, ways=["cold"]).passed


# The command.


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line within this process; return its exit status."""
    monkeypatch.setattr("sys.argv", ["lockstep", "verify", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It writes both files, and its status tells a failure."""
    monkeypatch.setattr("lockstep.verify.certify", partial(certify, ways=["cold"]))
    folder, output = tiny(tmp_path, "llama"), tmp_path / "out"
    options = ("--against", "transformers", "--output", str(output))
    assert main(monkeypatch, str(folder), *options) == 0
    assert "PASS tiny: " in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {"tiny.md", "tiny.json"}
    worse = ("--component", "norm.rms_norm=tests.test_certificate:no_norm")
    assert main(monkeypatch, str(folder), *options, *worse) == 1
    assert "FAIL cold, reference: differs by " in capsys.readouterr().out


def no_norm(hidden: Tensor, *_: Any) -> Tensor:
    """Norm nothing."""
    return hidden.clone()


ERRORS = {
    "another library": (["demo", "--against", "vllm"], "--against takes transformers"),
    "an option of the other": (
        ["demo", "--against", "transformers", "--truth"],
        "--against takes transformers",
    ),
    "the other backend": (
        ["demo", "--against", "transformers", "--backend", "reference"],
        "--against takes transformers",
    ),
    "no certificate": (["demo", "--dtype", "float32"], "add --against transformers"),
    "no folder": (["nowhere", "--against", "transformers"], "is not a folder"),
    "a dtype": (
        ["demo", "--against", "transformers", "--dtype", "float64"],
        "by which the others are judged",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They name the cause."""
    arguments, message = ERRORS[name]
    assert main(monkeypatch, *arguments) == cli.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_output_that_is_a_file_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It, or what it would be in; nothing is computed."""
    monkeypatch.setattr("lockstep.verify.certify", None)
    file = tmp_path / "file"
    file.write_text("")
    for output in (file, file / "below"):
        options = ("--against", "transformers", "--output", str(output))
        assert main(monkeypatch, "demo", *options) == cli.USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --output {output} cannot be a folder: ")


def test_what_transformers_lacks_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A family that it has no model for, and one that neither knows."""
    folder = tiny(tmp_path, "llama")
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    monkeypatch.delitem(names, "llama")
    with pytest.raises(ConfigError, match="has no model for family 'llama'"):
        certify(folder)
    edit_config(folder, model_type="mystery")
    with pytest.raises(ConfigError, match="'mystery' is not implemented; supported"):
        certify(folder)


def test_parameters_that_transformers_makes_up_are_told(tmp_path: Path) -> None:
    """A checkpoint that is whole for Lockstep must be so for the library."""
    folder = tiny(tmp_path, "llama", tie_word_embeddings=True)
    config = read_model_config(read_config_files(folder))
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="does not find lm_head.weight"):
        Library(folder, replace(config, tie_embeddings=False), CPU, "float32")


def test_the_library_is_asked_without_a_cache(tmp_path: Path) -> None:
    """Each time, and for whole texts."""
    theirs, asked = library(tiny(tmp_path, "llama")), list[tuple[int, bool]]()

    def look(_: Any, given: Any, named: dict[str, Any]) -> None:
        asked.append((given[0].shape[1], named["use_cache"]))

    theirs.model.register_forward_pre_hook(look, with_kwargs=True)
    theirs.greedy([1, 2, 3], 2)
    assert asked == [(3, False), (4, False)]


# What is said of transformers, in the order of the table.


def test_time_step_limits_are_not_read_by_nemotron_h(tmp_path: Path) -> None:
    """The library takes another field; certificates put that right."""
    limits = (0.3, 0.9)
    model = oracle(tmp_path, time_step_limit=limits)
    mixers = [e.mixer for e in model.model.layers if hasattr(e.mixer, "A_log")]
    assert all(mixer.time_step_limit != limits for mixer in mixers)
    assert certify(tmp_path / "tiny", ways=["cold"]).passed


@pytest.mark.parametrize("family", HYBRIDS)
def test_one_token_after_a_cache_obeys_no_limits(family: str, tmp_path: Path) -> None:
    """Limits alone make the same token differ with and without a cache."""
    limits = {"time_step_limit": (0.3, 0.9), "time_step_min": 0.3}
    free = cached_gap(oracle(tmp_path / "free", family))
    held = cached_gap(oracle(tmp_path / "held", family, **limits))
    assert held > WITNESS_FACTOR * free


def kept(model: Any, text: Tensor) -> dict[str, Any]:
    """Compute all but the last token; what is kept of them, by the name it goes by."""
    before = model(text[:, :-1], use_cache=True)
    names = ("cache", "cache_params", "past_key_values")
    return {name: before[name] for name in names if before.get(name) is not None}


@torch.no_grad()
def cached_gap(model: Any) -> float:
    """Compare the last token of a text, computed whole and after a cache."""
    text = ids(33)
    positions = (
        {}
        if "Mamba2" in type(model).__name__
        else {"position_ids": torch.tensor([[32]])}
    )
    after = model(text[:, -1:], use_cache=True, **positions, **kept(model, text))
    return float((after.logits[0, -1] - model(text).logits[0, -1]).abs().max())


@torch.no_grad()
def test_positions_of_bamba_start_over_after_a_cache(tmp_path: Path) -> None:
    """A token after a cache is at position 0 unless told otherwise."""
    model, text = oracle(tmp_path, "bamba"), ids(33)

    def after(**options: Any) -> Tensor:
        return model(text[:, -1:], **kept(model, text), **options).logits

    first = after(position_ids=torch.tensor([[0]]))
    assert torch.equal(after(), first)
    assert not torch.equal(after(position_ids=torch.tensor([[32]])), first)


def test_a_tied_head_of_nemotron_h_is_not_tied(tmp_path: Path) -> None:
    """Certificates tie it."""
    model = oracle(tmp_path, tie_word_embeddings=True)
    assert model.lm_head.weight is not model.model.embeddings.weight


def test_attention_bias_of_nemotron_h_makes_none(tmp_path: Path) -> None:
    """The option is there, the bias is not; Lockstep refuses."""
    model = oracle(tmp_path, attention_bias=True)
    assert not any("q_proj.bias" in name for name, _ in model.named_parameters())
    with pytest.raises(ConfigError, match="attention_bias=True is not implemented"):
        certify(tmp_path / "tiny")


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_padding_gets_into_the_convolution(family: str, tmp_path: Path) -> None:
    """With a bias, a text after padding differs from the text alone."""
    name = "use_bias" if family in ("nemotron_h", "mamba2") else "mamba_proj_bias"
    gaps: list[float] = []
    for bias in (False, True):
        model, text = oracle(tmp_path / str(bias), family, **{name: bias}), ids(9)
        padded = torch.cat((torch.zeros(1, 7, dtype=torch.long), text), 1)
        mask = torch.cat((torch.zeros(1, 7), torch.ones(1, 9)), 1).long()
        places = {} if family == "mamba2" else {"position_ids": mask.cumsum(1) - 1}
        places = {k: v.clamp(min=0) for k, v in places.items()}
        alone = model(text, use_cache=False).logits
        behind = model(padded, attention_mask=mask, use_cache=False, **places).logits
        gaps.append(float((behind[:, 7:] - alone).abs().max()))
    assert gaps[1] > WITNESS_FACTOR * gaps[0]


def test_the_router_of_granite_rounds_to_the_model() -> None:
    """Its product and its weights are of the model's dtype."""
    source = inspect.getsource(GraniteMoeHybridTopKRouter.forward)
    assert "F.linear(hidden_states, self.weight).float()" in source
    assert ".type_as(hidden_states)" in source


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_a_gated_norm_is_one_for_each_group(family: str, tmp_path: Path) -> None:
    """By itself, while that is a fault of the release, one group sways the others."""
    mine = library(tiny(tmp_path, family)).model
    config = read_model_config(read_config_files(tmp_path / "tiny"))
    assert config.mamba and config.mamba.num_groups > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    channels = config.mamba.inner_size
    size = channels // config.mamba.num_groups
    is_alone: list[bool] = []
    for model in (mine, theirs):
        norm: Any = mamba_layers(model)[0].norm
        values = torch.rand(channels).repeat(2, 1, 1, 1)
        values[1, ..., size:] *= 9
        # Of the first group alone, whose inputs are the same.
        first, second = norm(values, torch.ones_like(values))[..., :size]
        is_alone.append(torch.equal(first, second))
    told = [each["fault"] for each in _faults(family, transformers.__version__)]
    is_told = any(text.startswith("the gated norm") for text in told)
    assert is_alone == [True, not is_told]


@pytest.mark.parametrize("family", BASES)
@torch.no_grad()
def test_a_model_in_float64_goes_through_float32(family: str, tmp_path: Path) -> None:
    """By itself it is about as far off as in float32; in certificates it is not."""
    text = ids(40)
    theirs = library(tiny(tmp_path, family))
    narrow = theirs.logprobs(text[0].tolist())
    theirs.widen()
    exact = theirs.logprobs(text[0].tolist())
    assert exact.dtype == torch.float64
    own = theirs.model(text, use_cache=False).logits[0].double()
    own_gap, gap = (
        (values - exact).abs().max() for values in (own.log_softmax(-1), narrow)
    )
    assert own_gap * WITNESS_FACTOR > gap


def test_every_fault_has_a_family() -> None:
    """Each is of families that there are."""
    for fault in TABLES["faults"]:
        assert set(fault["families"]) <= set(BASES)


@pytest.mark.parametrize("release", ["5.17.0", "5.22.2", "5.23.0", "5.100.0.dev0"])
def test_a_fault_that_was_mended_is_not_told(release: str) -> None:
    """What is wrong with one release may not be with the next."""
    told = [fault["fault"] for fault in _faults("bamba", release)]
    norms = [text for text in told if text.startswith("the gated norm")]
    assert len(norms) == (release in ("5.17.0", "5.22.2"))
    assert len(told) > len(norms)


# What is committed.


def test_there_is_one_of_each() -> None:
    """The demo model, and each family."""
    names = {path.stem for path in RESULTS.glob("*.json")}
    assert names == {"demo", *(f"tiny-{family}" for family in BASES)}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_committed_certificates_pass(path: Path) -> None:
    """Each is rendered from its JSON."""
    made = Certificate(json.loads(path.read_text()))
    assert made.passed, made
    assert path.with_suffix(".md").read_text() == made.page


def test_tiny_checkpoints_do_not_depend_on_last_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Logarithms that round otherwise give the same file."""
    draw = checkpoints.log_uniform

    def other(values: Tensor, low: float, high: float) -> Tensor:
        drawn = draw(values, low, high)
        return drawn.copy_(drawn.nextafter(torch.tensor(math.inf)))

    for name in ("one", "other"):
        save_rounded("mamba2", tmp_path / name)
        monkeypatch.setattr(checkpoints, "log_uniform", other)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == two.read_bytes()
