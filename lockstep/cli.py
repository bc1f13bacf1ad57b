"""The command line: ``lockstep demo``, ``generate``, ``chat``, ``info`` and others.

Everything heavy is imported inside the commands, so that ``--help`` answers at once.
Options of sampling and of the engine are the fields of `SamplingParams` and
`EngineConfig`, with their names and defaults.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lockstep import __version__
from lockstep.config import EngineConfig, engine_options
from lockstep.errors import ConfigError, LockstepError, RequestError
from lockstep.request import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from lockstep.chat import Chat
    from lockstep.llm import LLM
    from lockstep.stream import StreamDelta

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Console(highlight=False)
notes = Console(stderr=True, highlight=False, soft_wrap=True)

#: Around the package: a checkout, unless the package is installed.
ROOT = Path(__file__).resolve().parents[1]
#: Exit status after an error that users can meet.
USER_ERROR = 2
#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Exit status after a request that failed within an engine.
ENGINE_ERROR = 1

#: Longest reply unless asked for otherwise, in tokens.
MAX_TOKENS = 128
#: Options of the engine that have a flag of their own; `--option` takes every other.
ENGINE_FLAGS = (
    "max_requests",
    "max_tokens_per_step",
    "max_length",
    "block_size",
    "num_blocks",
    "snapshot_slots",
    "memory_fraction",
    "prefix_caching",
)

#: What an option is for, where a docstring says more than a list of options should.
HELP = {
    "temperature": "Divides the logits; 0 is greedy.",
    "min_tokens": "Tokens before any end or stop token may come.",
    "top_k": "Draw from this many of the likeliest tokens.",
    "top_p": "Draw from the likeliest tokens that make up this share.",
    "min_p": "Draw from tokens at least this share as likely as the best.",
    "seed": "Key of the random draws.",
    "ignore_eos": "Go on after an end-of-sequence token.",
    "stop_token_ids": "A token that ends the text; repeatable.",
    "stop": "A string before which the text ends; repeatable.",
    "logprobs": "Report this many of the likeliest tokens (in JSON).",
    "prompt_logprobs": "The same for the tokens of the prompt.",
    "prompt_logprobs_from": "First position of the prompt to report.",
    "max_requests": "Requests that may run at once.",
    "max_tokens_per_step": "Tokens computed in one step.",
    "max_length": "Longest prompt plus output, in tokens.",
    "block_size": "Tokens in a K/V block.",
    "num_blocks": "K/V blocks; what fits unless set.",
    "snapshot_slots": "Slots for Mamba states; what fits unless set.",
    "memory_fraction": "Share of the device's memory that may be used.",
    "prefix_caching": "Keep no finished work for prompts that repeat it.",
}

#: Kinds of layers by their letter.
KINDS = {"M": "Mamba-2", "*": "attention", "-": "MLP", "E": "mixture of experts"}

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or demo.")
]
Where = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Width = Annotated[str, typer.Option(help="auto, float16/32/64 or bfloat16.")]
Side = Annotated[str, typer.Option(help="reference or optimized.")]
Named = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="Any option of EngineConfig; repeatable."
    ),
]
Against = Annotated[
    str | None,
    typer.Option(metavar="transformers", help="Hold both backends to it instead."),
]
Certificates = Annotated[
    Path | None, typer.Option(help="Folder for its certificate; printed unless given.")
]
CertifiedWidth = Annotated[
    str | None, typer.Option(help="float32 (unless given), auto, bfloat16 or float16.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes on stderr.")]
OtherModel = Annotated[
    str | None, typer.Option(help="demo, granite-350m or a checkpoint folder.")
]
Prompts = Annotated[int | None, typer.Option(min=1, help="Prompts at once.")]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of each.")]
NewTokens = Annotated[int | None, typer.Option(min=2, help="Tokens made of each.")]
OnlyRungs = Annotated[
    list[str] | None, typer.Option(metavar="RUNG", help="A rung; repeatable.")
]
Seconds = Annotated[
    float, typer.Option(min=0, help="Most that a run of a rung may take.")
]
Output = Annotated[Path | None, typer.Option(help="A folder for JSON and a plot.")]
Commit = Annotated[str | None, typer.Option(help="The commit, where git cannot say.")]


# Options that come from dataclasses.


def describe_fields(kind: type) -> dict[str, str]:
    """Take the first sentence on each attribute from a class's docstring.

    >>> describe_fields(EngineConfig)["num_blocks"]
    'K/V blocks; what fits unless set.'
    """
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.+?)(?=^    \w|\Z)", text, re.M | re.S)
    return {
        name: re.split(r"(?<=\.) ", " ".join(about.replace("``", "").split()))[0]
        for name, about in entries
    }


def as_parameter(kind: type, name: str, panel: str, **defaults: Any) -> Any:
    """Make a command's parameter of a dataclass's field."""
    hint: Any = get_type_hints(kind)[name]
    (entry,) = (each for each in fields(kind) if each.name == name)
    default, metavar = defaults.get(name, entry.default), None
    about = HELP.get(name) or describe_fields(kind).get(name)
    if default == ():
        is_id = "int" in str(hint)
        hint, metavar = (list[int], "ID") if is_id else (list[str], "TEXT")
        default = None
    if default is True:
        name, default = f"no_{name}", False
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=about,
        rich_help_panel=panel,
        metavar=metavar,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, option],
    )


def takes(*groups: Literal["sampling", "engine"]) -> Callable[[Any], Any]:
    """Give a command the options of these groups; it finds them in its ``chosen``."""
    more: list[inspect.Parameter] = []
    if "sampling" in groups:
        more += [
            as_parameter(SamplingParams, each.name, "Sampling", max_tokens=MAX_TOKENS)
            for each in fields(SamplingParams)
        ]
    if "engine" in groups:
        more += [as_parameter(EngineConfig, name, "Engine") for name in ENGINE_FLAGS]

    def decorate(command: Any) -> Any:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        # Typer reads the signature; the last parameter of the function takes the rest.
        command.__signature__ = inspect.Signature([*own[:-1], *more])
        return command

    return decorate


def pick(kind: type, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Pick a dataclass's fields out of what was chosen, but for those left open."""
    picked: dict[str, Any] = {}
    for entry in fields(kind):
        if chosen.get(entry.name) not in (None, []):
            picked[entry.name] = chosen[entry.name]
        if chosen.get(f"no_{entry.name}"):
            picked[entry.name] = False
    return picked


def read_pairs(flag: str, form: str, given: Sequence[str] | None) -> dict[str, str]:
    """Read what an option is given in its form, such as ``NAME=VALUE``."""
    pairs: dict[str, str] = {}
    for pair in given or ():
        name, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"{flag} is {pair!r}; it must be {form}")
        pairs[name.strip()] = value.strip()
    return pairs


def read_options(named: Sequence[str] | None) -> dict[str, Any]:
    """Read ``name=value`` pairs; a value is a Python literal or else text.

    Raises:
        ConfigError: A name that is no option of `EngineConfig`, or a bad value.
    """
    options: dict[str, Any] = {}
    for name, text in read_pairs("--option", "NAME=VALUE", named).items():
        name = name.replace("-", "_")
        value: Any = tuple(text.split(",")) if name == "debug" else text
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            literal = ast.literal_eval(text)
            # The other options have one value, which a tuple is not.
            value = text if type(literal) is tuple and name != "debug" else literal
        options[name] = value
    # Only these names go on: a model takes others by keyword, such as its device.
    engine_options(EngineConfig(), options)
    return options


# Commands.


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def lockstep(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, help="Print the version."),
    ] = False,
) -> None:
    """Lockstep: an inference engine for hybrid language models.

    Start with **lockstep demo**.
    """


@app.command()
def demo(
    device: Where = "auto",
    backend: Annotated[
        str, typer.Option(help="reference, optimized, or both.")
    ] = "both",
    max_tokens: Annotated[int, typer.Option(help="Longest reply, in tokens.")] = 48,
    seed: Annotated[int, typer.Option(help="Key of the random draws.")] = 32,
) -> None:
    """Let the packaged model answer two prompts; the second reuses the first."""
    from lockstep.demo import show_demo

    show_demo(device, backend, max_tokens, seed)


@app.command()
@takes("sampling", "engine")
def generate(
    model: ModelName = "demo",
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts; stdin if there is none."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A prompt a line; in a .jsonl, text, ids or messages."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    device: Where = "auto",
    dtype: Width = "auto",
    backend: Side = "reference",
    option: Named = None,
    **chosen: Any,
) -> None:
    """Continue prompts.

    The text goes to stdout as it comes, all else to stderr. With --json each output is
    one line, with its token ids, cache report, timings and log-probabilities.
    """
    sampling = SamplingParams(**pick(SamplingParams, chosen))
    texts = read_prompts(model, prompts, file)
    llm = load(model, device, dtype, backend, quiet, option, chosen)
    if len(texts) == 1 and not as_json:
        prompt = texts[0] if isinstance(texts[0], str) else ""
        output = show_stream(llm.stream(texts, sampling), prompt)
        if not quiet:
            note(f"{sum_up(output)}; prompt: {reuse_of(output)}")
        return fail_with([output])
    outputs = llm.generate(texts, sampling)
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            print(json.dumps(as_json_object(output)))
        else:
            show_text(text, output.text)
    if not quiet and not as_json:
        count = sum(len(output.token_ids) for output in outputs)
        note(f"{len(outputs)} prompts, {tokens(count)} generated")
    fail_with(outputs)


@app.command()
@takes("sampling", "engine")
def chat(
    model: ModelName = "demo",
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    quiet: Quiet = False,
    device: Where = "auto",
    dtype: Width = "auto",
    backend: Side = "reference",
    option: Named = None,
    **chosen: Any,
) -> None:
    """Talk with a model, and see what each turn reuses.

    Lines come from the terminal or from stdin. /reset starts over, /exit ends.
    """
    sampling = SamplingParams(**pick(SamplingParams, chosen))
    llm = load(model, device, dtype, backend, quiet, option, chosen)
    from lockstep.chat import Chat

    talk = Chat(llm, system, sampling)
    if sys.stdin.isatty() and not quiet:
        note("/reset starts over, /exit or Ctrl-D ends")
    for line in read_lines():
        if line == "/exit":
            break
        if line == "/reset":
            talk.reset()
            note("the conversation starts over")
        elif line.startswith("/"):
            note(f"{line} is no command; /reset and /exit are")
        elif line:
            take_turn(talk, line, quiet)


@app.command()
@takes("engine")
def info(
    model: ModelName = "demo",
    as_json: AsJson = False,
    device: Where = "auto",
    dtype: Width = "auto",
    option: Named = None,
    **chosen: Any,
) -> None:
    """Show a model's layers, its parameters and what fits.

    Only the config is read, so the weights need not be there.
    """
    from lockstep import llm, memory, parameters
    from lockstep.families import read_config_files, read_model_config

    options = pick(EngineConfig, chosen) | read_options(option)
    engine = engine_options(EngineConfig(), options)
    config = read_model_config(read_config_files(llm.find_folder(model)))
    where = llm.find_device(device)
    width = llm.find_dtype(dtype, config, where)
    sizes = memory.plan_memory(config, engine, where, width)
    counts = count_parameters(config)
    total = sum(count for _, count in counts.values())
    weights = parameters.num_weight_bytes(config, width)
    if as_json:
        layers = {k: {"layers": n, "parameters": c} for k, (n, c) in counts.items()}
        settled = {"device": str(where), "dtype": str(width).removeprefix("torch.")}
        about = {"family": config.family, "layer_pattern": config.layer_pattern}
        about |= {"checkpoint_dtype": config.dtype, "parameters": total}
        about |= {"layers": layers, **settled, "weight_bytes": weights}
        print(json.dumps({**about, "sizes": asdict(sizes)}, indent=2))
        return
    console.print(f"[bold]{config.family}[/], layers [bold]{config.layer_pattern}[/]")
    console.print(layer_table(counts, total))
    console.print()
    first, *plan = memory.describe(config, sizes, width, where).splitlines()
    console.print(f"As {first.rpartition(', ')[2]}:", markup=False)
    lines = [f"weights      {weights / 1024**2:,.1f} MiB", *plan]
    console.print(Padding("\n".join(lines), (0, 0, 0, 2)), markup=False)


@app.command()
def verify(
    model: ModelName = "demo",
    backend: Side = "optimized",
    device: Where = "cpu",
    component: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=WHOSE", help="Whose a part is, or module:name."),
    ] = None,
    free_running: Annotated[
        bool, typer.Option("--free-running", help="Let errors add up.")
    ] = False,
    truth: Annotated[
        bool, typer.Option("--truth", help="Show errors against float64, by layer.")
    ] = False,
    mutant: Annotated[
        str | None, typer.Option(metavar="ID", help="Judge a known fault instead.")
    ] = None,
    option: Named = None,
    against: Against = None,
    dtype: CertifiedWidth = None,
    output: Certificates = None,
    commit: Annotated[str, typer.Option(help="The commit, where git cannot say.")] = "",
) -> None:
    """Hold a backend to the reference, step by step.

    Exit status 1 means that they differ; the first difference is named. A known fault,
    which only a checkout has, is put into a copy. With --against transformers, every
    way to compute a checkpoint is held to that library's own model code.
    """
    parts = read_pairs("--component", "KEY=WHOSE", component)
    if parts and (here := str(Path.cwd())) not in sys.path:
        # As with ``python -m``.
        sys.path.insert(0, here)
    others = bool(free_running or truth or option or backend != "optimized")
    if mutant and (others or parts or (model, device) != ("demo", "cpu")):
        raise ConfigError("--mutant goes by itself: it brings its own scene")
    has_own = bool(dtype or output or commit)
    if asks_for_certificate(against, others or mutant is not None, has_own):
        given = device, dtype or "float32", output, commit
        raise typer.Exit(certify(model, parts, *given))
    if mutant is not None:
        raise typer.Exit(judge_mutant(mutant))
    from lockstep.llm import find_device
    from lockstep.verify import show, verify

    verdict = verify(
        backend,
        parts,
        model=model,
        device=str(find_device(device)),
        free_running=free_running,
        truth=truth,
        **read_options(option),
    )
    show(verdict, console)
    raise typer.Exit(0 if verdict.equal else ENGINE_ERROR)


def asks_for_certificate(against: str | None, has_others: bool, has_own: bool) -> bool:
    """Tell whether a certificate is asked for, and by options that go together.

    Args:
        against: The third engine.
        has_others: Whether there are options that no certificate has.
        has_own: Whether there are options that only a certificate has.
    """
    if against is None and has_own:
        raise ConfigError("--dtype, --output and --commit: add --against transformers")
    if against is not None and (against != "transformers" or has_others):
        raise ConfigError(
            "--against takes transformers, and besides it MODEL, --device, "
            "--component, --dtype, --output and --commit alone"
        )
    return against is not None


@app.command()
def ladder(
    device: Where = "auto",
    model: OtherModel = None,
    prompts: Prompts = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    only: OnlyRungs = None,
    seconds: Seconds = 3.0,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Time the rungs from the reference to the optimized engine, in a checkout.

    Each is held to the reference first. Exit status 1 means that one differs; it is
    not timed. A GPU gets a larger model and more tokens unless told otherwise.
    """
    root = find_checkout("the ladder")
    if root != ROOT or not find_spec("benchmarks"):
        # Its benchmarks are of its own package.
        raise typer.Exit(run_python(root, "-m", "lockstep", *sys.argv[1:]))
    make_folder(output)
    from lockstep.ladder import climb

    counts = prompts, prompt_tokens, new_tokens
    if not climb(device, model, counts, only or (), seconds, output, commit):
        raise typer.Exit(ENGINE_ERROR)


# What the commands lean on.


def certify(
    model: str,
    parts: Mapping[str, Any],
    device: str,
    dtype: str,
    output: Path | None,
    commit: str,
) -> int:
    """Hold a checkpoint to transformers; write what came of it, or print it.

    Returns:
        The exit status.
    """
    from lockstep.verify import certify, library

    make_folder(output)
    library.hush()
    options: Any = {"device": device, "dtype": dtype, "commit": commit}
    made = certify(model, parts, verbose=True, **options)
    print(made.page if output is None else f"{made}\n{made.write(output)}")
    return 0 if made.passed else ENGINE_ERROR


def judge_mutant(name: str) -> int:
    """Run the script of a checkout that judges a known fault; return its status."""
    root = find_checkout("--mutant")
    return run_python(root, str(root / "scripts" / "verify_mutants.py"), name)


def find_checkout(what: str) -> Path:
    """Find the checkout that something needs: around the package, or where one is.

    Raises:
        ConfigError: There is none.
    """
    here = Path.cwd()
    for folder in (ROOT, here):
        if (folder / "scripts" / "verify_mutants.py").exists():
            return folder
    raise ConfigError(f"{what} needs a checkout, and {here} is none; change into one")


def run_python(root: Path, *arguments: str) -> int:
    """Run Python on the package of a checkout; return its status."""
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', root)}"
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment).returncode


def make_folder(output: Path | None) -> None:
    """Make the folder for results, if there is one: better now than after the work.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}; name another folder"
        raise ConfigError(f"--output {output} cannot be a folder: {why}") from None


def load(
    model: str,
    device: str,
    dtype: str,
    backend: str,
    quiet: bool,
    named: Sequence[str] | None,
    chosen: Mapping[str, Any],
) -> LLM:
    """Build a model as the options say."""
    from lockstep.llm import LLM

    options = pick(EngineConfig, chosen) | read_options(named)
    return LLM(model, backend, device, dtype, verbose=not quiet, **options)


def read_prompts(
    model: str, prompts: Sequence[str] | None, file: Path | None
) -> list[Any]:
    """Take prompts from the arguments, a file or stdin.

    Raises:
        RequestError: There is none, or the file cannot be read.
    """
    if file is not None:
        prompts = [*(prompts or ()), *read_file(file)]
    elif not prompts and not sys.stdin.isatty():
        prompts = [text] if (text := sys.stdin.read().rstrip("\n")) else []
    if not prompts:
        raise RequestError(
            f"there is no prompt for model {model!r}; give one after it, in a --file "
            "or on stdin"
        )
    return list(prompts)


def read_file(file: Path) -> Iterator[Any]:
    """Give out the prompts of a file, one a line; blank lines are none.

    Raises:
        RequestError: The file cannot be read, or a line of it is no prompt.
    """
    read, where = parse_prompt if file.suffix == ".jsonl" else str, str(file)
    try:
        # `splitlines` also cuts at characters that texts and JSON strings may hold.
        lines = file.read_bytes().decode("utf-8-sig").split("\n")
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            if line.strip():
                yield read(line.removesuffix("\r"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be read: {error}") from None


def parse_prompt(line: str) -> Any:
    """Take a prompt from a line of JSON.

    Raises:
        ValueError: It is no JSON, or none of what a prompt may be.
    """
    prompt = json.loads(line)
    kinds = {type(each) for each in prompt} if isinstance(prompt, list) else set()
    if isinstance(prompt, str) or kinds in ({int}, {dict}):
        return prompt
    raise ValueError("a prompt is text, a list of token ids or a list of messages")


def read_lines() -> Iterator[str]:
    """Give out a user's lines until there are no more."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with suppress(ImportError):
        # Lets `input` edit lines.
        import_module("readline")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        yield line.strip()


def take_turn(talk: Chat, line: str, quiet: bool) -> None:
    """Show a reply, and what its prompt reused."""
    try:
        output = show_stream(talk.stream(line))
    except RequestError as error:
        # A conversation that has grown too long can start over.
        if talk.token_ids and sys.stdin.isatty():
            return note(f"error: {error}; /reset starts over")
        raise
    fail_with([output])
    if not quiet:
        note(f"{reuse_of(output)}; {sum_up(output)}\n")


class Writer:
    """Writes a text as it comes; on a terminal, lines break between words."""

    def __init__(self) -> None:
        """Start at the beginning of a line."""
        self._width = console.width if console.is_terminal else 0
        self._column, self._word = 0, ""

    def write(self, text: str, style: str | None = None) -> None:
        """Write the words that are whole; what comes next may belong to the last."""
        if not self._width:
            print(text, end="", flush=True)
            return
        for char in text:
            if not char.isspace():
                self._word += char
                continue
            self.flush(style)
            is_full = self._column + 1 >= self._width
            console.out("\n" if is_full else char, end="")
            self._column = 0 if is_full or char == "\n" else self._column + 1

    def flush(self, style: str | None = None) -> None:
        """Write the last word."""
        length = cell_len(self._word)
        if self._column and self._column + length > self._width:
            console.out()
            self._column = 0
        console.out(self._word, style=style, end="")
        self._column, self._word = self._column + length, ""


def show_stream(
    deltas: Generator[StreamDelta, None, None], prompt: str = ""
) -> RequestOutput:
    """Write a text as it comes and return the output; a terminal shows the prompt."""
    output, writer = None, Writer()
    if console.is_terminal:
        writer.write(prompt, style="dim")
    with closing(deltas):
        for delta in deltas:
            writer.write(delta.text)
            output = delta.output
    writer.flush()
    print()
    assert output is not None
    return output


def show_text(prompt: object, text: str) -> None:
    """Write a prompt and its text: on a terminal as one, elsewhere on two lines."""
    if not console.is_terminal:
        return print(f"> {prompt}\n{text.strip()}\n")
    writer = Writer()
    writer.write(str(prompt), style="dim")
    writer.write(text)
    writer.flush()
    print("\n")


def note(text: str) -> None:
    """Write a line that is no part of the text."""
    notes.print(text, style="dim", markup=False)


def sum_up(output: RequestOutput) -> str:
    """Say how much was generated, why it ended and how fast it went."""
    pace = output.timings.per_token
    speed = f", {1 / pace:,.0f} a second" if pace else ""
    return f"{tokens(len(output.token_ids))} ({output.finish_reason}){speed}"


def reuse_of(output: RequestOutput) -> str:
    """Say how much of a prompt was computed and how much reused."""
    reused = output.cache.num_skipped_tokens
    computed = len(output.prompt_token_ids) - reused
    return f"{tokens(computed)} computed, {reused} reused"


def tokens(count: int) -> str:
    """Count tokens in words."""
    return f"{count} token" + "s" * (count != 1)


def fail_with(outputs: Sequence[RequestOutput]) -> None:
    """End with an error if a request failed."""
    failed = [each for each in outputs if each.finish_reason is FinishReason.ERROR]
    for output in failed:
        print(f"error: {output.request_id}: {output.error}", file=sys.stderr)
    if failed:
        raise typer.Exit(ENGINE_ERROR)


def as_json_object(output: RequestOutput) -> dict[str, Any]:
    """Bring an output into JSON's types; timings as durations in seconds."""
    timings = output.timings
    return asdict(output) | {
        "timings": {
            "queue": timings.queue,
            "first_token": timings.first_token,
            "per_token": timings.per_token,
        }
    }


def count_parameters(config: Any) -> dict[str, tuple[int, int]]:
    """Count layers and parameters by kind of layer, and what is in no layer."""
    from math import prod

    from lockstep.parameters import parameter_specs

    totals = dict.fromkeys([*KINDS, ""], 0)
    for name, spec in parameter_specs(config).items():
        match = re.match(r"layers\.(\d+)\.", name)
        totals[config.layer_pattern[int(match[1])] if match else ""] += prod(spec.shape)
    counts = {
        kind: (config.layer_pattern.count(letter), totals[letter])
        for letter, kind in KINDS.items()
        if letter in config.layer_pattern
    }
    return {**counts, "embedding, head, norm": (0, totals[""])}


def layer_table(counts: Mapping[str, tuple[int, int]], total: int) -> Table:
    """Lay out layers and parameters by kind."""
    letters = {kind: letter for letter, kind in KINDS.items()}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "", "layers", "parameters", "share"):
        table.add_column(title, justify="right" if title else "left")
    for kind, (layers, count) in counts.items():
        cells = str(layers or ""), f"{count:,}", f"{count / total:.0%}"
        table.add_row(letters.get(kind, ""), kind, *cells)
    layers = sum(layers for layers, _ in counts.values())
    table.add_row("", "all", str(layers), f"{total:,}", "", style="bold")
    return table


def main() -> None:
    """Run the command line; errors that users can meet are one line."""
    warnings.showwarning = show_warning
    try:
        app()
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except UnicodeDecodeError as error:
        print(f"error: stdin is not UTF-8: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # What was being written has no end of line.
            print(file=sys.stderr)
        raise


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning without the place that raised it."""
    print(f"warning: {message}", file=sys.stderr)
