"""The command line: ``lockstep demo``.

Everything heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.llm import LLM
    from lockstep.request import RequestOutput
    from lockstep.tokenizer import Tokenizer

app = typer.Typer(
    help="Lockstep: an inference engine for hybrid language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False)

#: Exit status after an error that users can meet.
USER_ERROR = 2

#: The demonstration's scene, and who speaks.
SPEAKER, CHARACTER = "HORATIO", "HAMLET"
LINES = (
    "My lord, I have not seen you so merry. What is the matter?",
    "And what says the king to it?",
)
LEGEND = "M Mamba-2   * attention   - MLP   E mixture of experts"

Messages = list[dict[str, str]]


@app.callback()
def lockstep() -> None:
    """Hold the commands."""


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="reference or optimized.")] = "reference",
    max_tokens: Annotated[int, typer.Option(help="Longest reply, in tokens.")] = 48,
    seed: Annotated[int, typer.Option(help="Key of the random draws.")] = 32,
) -> None:
    """Let the packaged model answer twice; the second prompt reuses the first."""
    from lockstep.llm import LLM
    from lockstep.request import SamplingParams

    sampling = SamplingParams(temperature=0.5, max_tokens=max_tokens, seed=seed)
    with console.status("loading the demo model"):
        llm = LLM("demo", backend=backend, device=device, verbose=False)
    show_model(llm)
    messages: Messages = []
    history: list[int] = []
    for turn, line in enumerate(LINES, start=1):
        messages.append({"role": "user", "name": SPEAKER, "content": line})
        prompt = extend_history(llm.tokenizer, history, messages)
        output = llm.generate(prompt, sampling)[0]
        show_turn(turn, line, output)
        messages.append({"role": "assistant", "content": output.text})
        history = prompt + output.token_ids
    console.print(f"Next: [bold]lockstep demo --seed {seed + 1} --max-tokens 100[/]")


def extend_history(
    tokenizer: Tokenizer, history: list[int], messages: Messages
) -> list[int]:
    """Add the latest message to a conversation kept as token ids.

    The ids of earlier turns are those computed and generated. Tokenizing their text
    again could give others, and the cache knows only these.

    Args:
        tokenizer: With a chat template that ends each turn with its end token.
        history: Earlier turns; empty at first.
        messages: All messages; the last is new.
    """
    whole = tokenizer.apply_chat_template(messages)
    if not history:
        return whole
    before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=False)
    end = [] if history[-1] == before[-1] else before[-1:]
    return history + end + whole[len(before) :]


def show_model(llm: LLM) -> None:
    """Print what the model is."""
    from lockstep.parameters import num_parameters

    config = llm.model_config
    millions = num_parameters(config) / 1e6
    dtype = str(llm.dtype).removeprefix("torch.")
    console.print(
        f"[bold]Lockstep demo[/]: {config.family}, {millions:.1f}M parameters, "
        f"{dtype} on {llm.device}"
    )
    console.print(f"Layers {config.layer_pattern}   [dim]{LEGEND}[/]")
    console.print(f"Cache in blocks of {llm.sizes.block_size} tokens\n")


def show_turn(turn: int, line: str, output: RequestOutput) -> None:
    """Print a prompt, its reply and what the cache did."""
    reused = output.cache.num_skipped_tokens
    computed = len(output.prompt_token_ids) - reused
    console.print(
        f"[bold]Prompt {turn}[/]: {computed} tokens computed, "
        f"[bold green]{reused} reused[/]"
    )
    if turn > 1:
        console.print(f"  Why: {output.cache.reason}", style="green", markup=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(f"[dim]{SPEAKER}[/]", line)
    grid.add_row(f"[bold]{CHARACTER}[/]", " ".join(output.text.split()))
    console.print(Padding(grid, (0, 0, 1, 2), expand=False))


def main() -> None:
    """Run the command line; errors that users can meet are one line."""
    warnings.showwarning = show_warning
    try:
        app()
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning without the place that raised it."""
    print(f"warning: {message}", file=sys.stderr)
