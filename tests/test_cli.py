"""The command line, as a user sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import LLM, SamplingParams, cli
from lockstep.blocks import align_down

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line from the checkout, in an ordinary terminal's width."""
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True
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
    assert "demo" in shown.stdout


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
    assert lines[-1].startswith("Next: lockstep demo ")


@pytest.mark.parametrize("max_tokens", [1, 20, 200])
def test_the_second_turn_computes_little(max_tokens: int) -> None:
    """At most a block and the new tokens, whether the reply was cut or ended itself."""
    llm = LLM("demo", device="cpu", verbose=False)
    messages = [{"role": "user", "name": cli.SPEAKER, "content": cli.LINES[0]}]
    prompt = cli.extend_history(llm.tokenizer, [], messages)
    assert prompt == llm.tokenizer.apply_chat_template(messages)
    sampling = SamplingParams(temperature=0.7, max_tokens=max_tokens, seed=3)
    (first,) = llm.generate(prompt, sampling)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "name": cli.SPEAKER, "content": cli.LINES[1]})
    history = prompt + first.token_ids
    prompt = cli.extend_history(llm.tokenizer, history, messages)
    assert prompt[: len(history)] == history
    assert prompt.count(llm.model_config.eos_token_ids[0]) == 3
    (second,) = llm.generate(prompt, sampling)
    assert second.cache.num_skipped_tokens == align_down(len(history) - 1, 16)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line within this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu9"), "error: device is 'tpu9'"),
        (("--backend", "fast"), "error: backend is 'fast'"),
        (("--backend", "optimized"), "error: the optimized backend has no engine yet"),
        (("--max-tokens", "0"), "error: max_tokens is 0"),
        (("--max-tokens", "9999"), "error: prompt 0: a prompt of"),
        (("--seed", "-1"), "error: seed is -1"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a user can get wrong gives one line and exit status 2."""
    assert main(monkeypatch, "demo", *arguments) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert err.startswith(message)
    assert len(err.splitlines()) == 1
    assert "Prompt" not in out


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A warning is shown without the place that raised it."""
    cli.show_warning(UserWarning("mind the gap"), UserWarning, "file.py", 3)
    assert capsys.readouterr().err == "warning: mind the gap\n"
