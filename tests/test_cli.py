"""The command line, as a user sees it."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from lockstep import EngineConfig, SamplingParams, __version__, cli

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line from the checkout, in an ordinary terminal's width."""
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, input=stdin
    )


def test_help_is_quick() -> None:
    """Help names the commands, and nothing heavy is imported for it."""
    code = (
        "import sys, lockstep.cli; "
        "sys.exit(len({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run("-c", code).returncode == 0
    shown = run("-m", "lockstep", "--help")
    assert shown.returncode == 0
    for command in ("demo", "generate", "chat", "info", "verify", "ladder"):
        assert re.search(rf"^│ {command} ", shown.stdout, re.M)
    assert "--version" in shown.stdout


def test_the_first_screen() -> None:
    """The demonstration fits 80 by 24, reuses the first turn and says what is next."""
    shown = run("-m", "lockstep", "demo", "--device", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= 80
    text = shown.stdout
    assert re.search(r"M parameters, float32 on cpu", text)
    assert re.search(r"Layers [M*E-]+ ", text)
    assert re.search(r"Prompt 1: \d+ tokens computed, 0 reused", text)
    reused = re.search(r"Prompt 2: (\d+) tokens computed, (\d+) reused", text)
    assert reused is not None
    assert int(reused[2]) > 0
    assert "Why: " in text
    assert "The optimized backend gave the same text." in text
    speeds = re.search(
        r"8 replies at once: reference ([\d,]+) tokens/s, optimized ([\d,]+) tokens/s",
        text,
    )
    assert speeds is not None and int(speeds[1].replace(",", "")) > 0
    assert lines[-1].startswith("Next: lockstep demo ")


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line within this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


GREEDY = ("--temperature", "0", "--max-tokens", "6")
DEMO = ("--device", "cpu", *GREEDY)


@pytest.mark.parametrize("command", ["generate", "chat", "info", "verify", "ladder"])
def test_help_fits_a_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option of a command is there in full, in a line's width."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main(monkeypatch, command, "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    few = {
        "info": cli.ENGINE_FLAGS,
        "verify": ("component", "mutant", "against", "dtype", "output", "commit"),
        "ladder": ("device", "model", "prompt-tokens", "only", "output", "commit"),
    }
    for name in few.get(command, tuple(cli.HELP)):
        flag = name.replace("_", "-")
        assert re.search(rf"--(no-)?{flag} ", text), name


def test_a_certificate_may_be_of_any_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of --dtype refuses none that there is."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main(monkeypatch, "verify", "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    widths = "float32 (unless given), auto, bfloat16 or float16."
    assert f"--dtype <str> {widths}" in text


def test_every_sampling_parameter_has_a_flag() -> None:
    """Names and defaults are those of the classes; only the length differs."""
    groups: list[tuple[type, Literal["sampling", "engine"]]]
    groups = [(SamplingParams, "sampling"), (EngineConfig, "engine")]
    for kind, group in groups:

        @cli.takes(group)
        def command(**_: Any) -> None: ...

        given = inspect.signature(command).parameters
        names = {entry.name for entry in dataclasses.fields(kind)}
        found = {name.removeprefix("no_") for name in given}
        assert found == (names if group == "sampling" else {*cli.ENGINE_FLAGS})
        chosen = {name: each.default for name, each in given.items()}
        changed: dict[str, Any] = {}
        if group == "sampling":
            changed["max_tokens"] = cli.MAX_TOKENS
        assert kind(**cli.pick(kind, chosen)) == kind(**changed)


def test_options_reach_their_class() -> None:
    """Lists, switches and values of every type."""
    chosen: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": []}
    chosen |= {"top_k": 3, "ignore_eos": True}
    params = SamplingParams(**cli.pick(SamplingParams, chosen))
    assert (params.stop, params.stop_token_ids) == (("a", "b"), ())
    assert (params.top_k, params.ignore_eos) == (3, True)
    assert cli.pick(EngineConfig, {"no_prefix_caching": True, "num_blocks": None}) == {
        "prefix_caching": False
    }
    named = ["scan-chunk-size=32", "eviction=ref_zero", "debug=integrity,poison"]
    assert cli.read_options([*named, "max_length=None", "snapshot_fraction=0.25"]) == {
        "scan_chunk_size": 32,
        "eviction": "ref_zero",
        "debug": ("integrity", "poison"),
        "max_length": None,
        "snapshot_fraction": 0.25,
    }


def test_generate_from_stdin() -> None:
    """The text alone is on stdout; the memory plan and a summary are on stderr."""
    shown = run("-m", "lockstep", "generate", *DEMO, stdin="To be, or not\n")
    assert shown.returncode == 0, shown.stderr
    again = run("-m", "lockstep", "generate", *DEMO, "-q", "demo", "To be, or not")
    assert (again.stdout, again.stderr) == (shown.stdout, "")
    assert shown.stdout.strip()
    assert "state slots" in shown.stderr
    last = shown.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"6 tokens \(length\), \d+ a second; prompt: \d tokens computed, 0 reused", last
    )


def test_generate_many_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A line for each prompt, in order, with all that its output holds."""
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Who's there?"}]
    file.write_text("\n".join(map(json.dumps, ["To be", [1, 2, 3], chat])))
    options = ("--json", "-q", "--logprobs", "2", "--file", str(file), *DEMO)
    assert main(monkeypatch, "generate", *options, "demo", "My lord") == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(outputs) == 4
    assert outputs[2]["prompt_token_ids"] == [1, 2, 3]
    for output in outputs:
        assert len(output["token_ids"]) == len(output["logprobs"])
        assert output["cache"]["reason"]
        assert set(output["timings"]) == {"queue", "first_token", "per_token"}
        assert output["finish_reason"] in ("stop", "length")


def test_generate_many_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each text stands under its prompt; blank lines of a file are no prompts."""
    file = tmp_path / "prompts.txt"
    file.write_text("To be\n\nMy lord\n")
    assert main(monkeypatch, "generate", *DEMO, "--file", str(file)) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line[:1] == ">"] == [
        "> To be",
        "> My lord",
    ]
    assert re.search(r"^2 prompts, \d+ tokens generated$", err, re.M)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_line_ends_at_a_newline_alone(suffix: str, tmp_path: Path) -> None:
    """Not at what else may part lines of a text; a mark of byte order is no text."""
    texts = ["a\u2028b\u2029c", "d\x85e", "f\x0cg\x0bh\x1ci\rj", "k"]
    file, lines = tmp_path / f"prompts{suffix}", texts
    if suffix == ".jsonl":
        lines = [json.dumps(each, ensure_ascii=False) for each in texts]
    for newline in ("\n", "\r\n"):
        for end in ("", newline, f"{newline} {newline}"):
            file.write_bytes((newline.join(lines) + end).encode("utf-8-sig"))
            assert cli.read_prompts("demo", None, file) == texts
    assert cli.read_prompts("demo", ["first"], file) == ["first", *texts]


NO_PROMPTS = (
    '{"role": "user", "content": "hi"}',
    '{"prompt": "hi"}',
    "3",
    "null",
    "true",
    "[]",
    "[1.5]",
    "[true]",
    '[1, "a"]',
    '["a", "b"]',
    "[[1]]",
    '[{"role": "user", "content": "hi"}, 1]',
)


@pytest.mark.parametrize("line", [*NO_PROMPTS, "{", "To be", "[" * 100_000])
def test_a_line_that_is_no_prompt_is_named(
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """By file and number, blank lines counted, and before a model is loaded."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"To be"\n\n{line}\n{line}\n', encoding="utf-8")
    assert main(monkeypatch, "generate", "--file", str(file)) == cli.USER_ERROR
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"error: {file}, line 3 cannot be read: ")
    if line in NO_PROMPTS:
        kinds = "a prompt is text, a list of token ids or a list of messages"
        assert shown.endswith(kinds)


def test_a_conversation_from_stdin() -> None:
    """Replies are on stdout; reuse is told turn by turn; commands are obeyed."""
    lines = "Who's there?\n\n/help\nIndeed?\n/reset\nWho's there?\n/exit\nmore\n"
    shown = run("-m", "lockstep", "chat", *DEMO, stdin=lines)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) >= 3
    reuse = re.findall(r"^(\d+) tokens? computed, (\d+) reused", shown.stderr, re.M)
    assert len(reuse) == 3
    assert [int(reused) for _, reused in reuse][0] == 0
    assert int(reuse[1][1]) >= 16
    assert "/help is no command" in shown.stderr
    assert "the conversation starts over" in shown.stderr
    first, *_, last = shown.stdout.splitlines()
    assert first == last


def test_info(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers, parameters and memory; the parts come to the whole."""
    options = ("--device", "cpu", "--dtype", "bfloat16", "--num-blocks", "9")
    assert main(monkeypatch, "info", *options, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    layers = about["layers"].values()
    assert sum(each["parameters"] for each in layers) == about["parameters"]
    assert sum(each["layers"] for each in layers) == len(about["layer_pattern"])
    assert about["weight_bytes"] >= 2 * about["parameters"]
    assert (about["dtype"], about["sizes"]["num_blocks"]) == ("bfloat16", 9)
    assert main(monkeypatch, "info", *options) == 0
    text = capsys.readouterr().out
    assert re.search(r"^M +Mamba-2 +5 +[\d,]+ +\d+%$", text, re.M)
    assert f"{about['parameters']:,}" in text
    assert "K/V blocks   9 x 16 tokens" in text
    assert max(map(len, text.splitlines())) <= 80


def test_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that of the package."""
    assert main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"lockstep {__version__}\n"


def test_lines_break_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal; elsewhere a text stays as it is."""
    pieces = ["It w", "as a\ntru", "th univers", "ally known,", " in a way"]

    def write() -> str:
        writer = cli.Writer()
        for piece in pieces:
            writer.write(piece)
        writer.flush()
        return capsys.readouterr().out

    monkeypatch.setattr(cli, "console", Console(width=12))
    assert write() == "".join(pieces)
    monkeypatch.setattr(cli, "console", Console(width=12, force_terminal=True))
    lines = write().split("\n")
    assert lines == ["It was a", "truth ", "universally", "known, in a", "way"]


def test_ctrl_c_ends_at_once() -> None:
    """Exit status 130, no traceback."""
    command = [sys.executable, "-m", "lockstep", "generate", "--max-tokens", "4000"]
    with subprocess.Popen(
        [*command, "--ignore-eos", "--device", "cpu", "demo", "To be"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    assert "Traceback" not in err


ERRORS = {
    "demo --device tpu9": "device is 'tpu9'",
    "demo --backend fast": "backend is 'fast'",
    "demo --backend optimized --device tpu9": "device is 'tpu9'",
    "demo --max-tokens 0": "max_tokens is 0",
    "demo --max-tokens 9999": "prompt 0: a prompt of",
    "demo --seed -1": "seed is -1",
    "generate": "there is no prompt for model 'demo'; give one after it",
    "generate no/folder Hello": "'no/folder' is not a folder",
    "generate demo Hello --temperature -1": "temperature is -1",
    "generate demo Hello --top-p 0": "top_p is 0",
    "generate demo Hello --block-size 17": "block_size 17 is not a multiple",
    "generate demo Hello --option fast=1": "unknown option 'fast'; known are",
    "generate demo Hello --option dtype=float64": "unknown option 'dtype'; known are",
    "generate demo Hello --option device=cpu": "unknown option 'device'; known are",
    "generate demo Hello --option verbose=1": "unknown option 'verbose'; known are",
    "generate demo Hello --option components={}": "unknown option 'components'; known",
    "generate demo Hello --option config=None": "unknown option 'config'; known are",
    "chat --option weights=None": "unknown option 'weights'; known are max_requests, ",
    "verify --option truth=True": "unknown option 'truth'; known are",
    "verify --option memory-fraction=half": "memory_fraction is 'half'; it must be a "
    "number",
    "info --option snapshot_fraction=None": "snapshot_fraction is None; it must be a",
    "info --option memory_fraction=(0.5,)": "memory_fraction is '(0.5,)'; it must be",
    "info --option max_requests=(1,2)": "max_requests is '(1,2)'; it must be an",
    "info --option max_requests={[]:1}": "max_requests is '{[]:1}'; it must be an",
    "info --option debug=5": "debug is 5; known are",
    "generate demo Hello --option fast": "--option is 'fast'; it must be NAME=VALUE",
    "verify --component scan.scan_decode": "--component is 'scan.scan_decode'; it must "
    "be KEY=WHOSE",
    "verify --component scan.scan_decode=:": "scan.scan_decode=':': ValueError: Empty",
    "verify --component scan.scan_decode=no.such:f": "scan.scan_decode='no.such:f': "
    "ModuleNotFoundError: No module named 'no'; it must be reference, optimized or",
    "generate demo Hello --stop-token-ids 9999": "prompt 0: stop_token_ids [9999]",
    "generate --file no/file": "no/file cannot be read",
    "chat no/folder": "'no/folder' is not a folder",
    "info no/folder": "'no/folder' is not a folder",
    "info --dtype int4": "dtype is 'int4'",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_one_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a user can get wrong gives one line and exit status 2."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    command, *arguments = line.split()
    quiet = ["--quiet"] if command in ("generate", "chat") else []
    assert main(monkeypatch, command, *quiet, *arguments) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {ERRORS[line]}")
    assert len(err.splitlines()) == 1
    assert "Prompt" not in out


def test_parts_are_found_in_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """First, as with ``python -m``, and however often; but by no other command."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, "info") == 0
    assert str(tmp_path) not in sys.path
    for _ in range(2):
        part = "scan.scan_decode=a_part_that_fails:scan"
        assert main(monkeypatch, "verify", "--component", part) == cli.USER_ERROR
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


FAULTY = {
    "def scan(:\n": "SyntaxError: invalid syntax (my_faulty_part.py, line 1)",
    "raise RuntimeError('no luck')\n": "RuntimeError: no luck",
    "import sys\nsys.exit(3)\n": "SystemExit: 3",
    "scan_decode = None\n": "AttributeError: module 'my_faulty_part' has no attribute",
}


@pytest.mark.parametrize("source", FAULTY)
def test_a_module_that_cannot_be_used_is_named(
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """With what is wrong with it, and what it must be."""
    (tmp_path / "my_faulty_part.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_faulty_part", raising=False)
    monkeypatch.chdir(tmp_path)
    part = "scan.scan_decode=my_faulty_part:scan"
    assert main(monkeypatch, "verify", "--component", part) == cli.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: scan.scan_decode='my_faulty_part:scan': {FAULTY[source]}"
    )
    assert line.endswith("of a module that Python finds and can import")


@pytest.mark.parametrize("kernels", ["triton", "mamba-ssm"])
def test_what_to_use_without_a_gpu(
    kernels: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interpreter is named for Lockstep's kernels alone, and needs Triton."""
    chosen = ("--backend", "optimized", "--option", f"kernels={kernels}")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(monkeypatch, "generate", *DEMO, *chosen, "demo", "Hello") == 2
    first = capsys.readouterr().err
    start = f'error: kernels={kernels!r} needs a GPU; use kernels="torch" on a CPU'
    assert first.startswith(start)
    assert ("TRITON_INTERPRET=1" in first) == (kernels == "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(monkeypatch, "generate", *DEMO, *chosen, "demo", "Hello") == 2
    assert capsys.readouterr().err == first


def test_bytes_that_are_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither on stdin nor in a file is it a traceback."""
    stdin = io.TextIOWrapper(io.BytesIO(b"To \xff"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(monkeypatch, "generate") == cli.USER_ERROR
    assert re.fullmatch("error: stdin is not UTF-8: .*\n", capsys.readouterr().err)
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"To \xff\n")
    assert main(monkeypatch, "generate", "--file", str(file)) == cli.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file} cannot be read: 'utf-8' codec can't")


def test_an_argument_that_is_no_text() -> None:
    """Bytes that are not UTF-8 give one line, too."""
    command = [sys.executable, "-m", "lockstep", "generate", "-q", *DEMO, "demo"]
    shown = subprocess.run([*command, b"ab\xff"], cwd=ROOT, capture_output=True)
    assert shown.returncode == cli.USER_ERROR
    (line,) = shown.stderr.decode().splitlines()
    assert line.startswith("error: prompt 0: this text is not valid Unicode")


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A warning is shown without the place that raised it."""
    cli.show_warning(UserWarning("mind the gap"), UserWarning, "file.py", 3)
    assert capsys.readouterr().err == "warning: mind the gap\n"
