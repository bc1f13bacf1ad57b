"""Let `lockstep.verify` find known faults.

    python scripts/verify_mutants.py M3
    python scripts/verify_mutants.py --all [--jobs 2]

The faults are those of ``tests/mutants.py``. A copy of the package in which one is
applied is the subject, and the package as it is the oracle. A side is copied into a
third backend, ``mutant``, so that single components can be exchanged. The vocabulary,
which both sides share, is copied with the reference under another name: what one says
to the other goes through pickles, and nothing is exchanged.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

# Products must not depend on where in memory their factors happen to lie.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lockstep import assemble  # noqa: E402
from lockstep.errors import RequestError  # noqa: E402
from lockstep.verify import Setup, Side, Verdict, show, verify  # noqa: E402
from scripts.mutants import Mutant, load  # noqa: E402
from scripts.scenes import MODELS, scenes  # noqa: E402

BACKEND = "mutant"
COPY = "mutated_lockstep"
SIDES = ("reference", "optimized")
#: Files and folders whose faults no engine can have, and why.
OUTSIDE = {
    "lockstep/tokenizer.py": "text is made of tokens outside of engines",
    "lockstep/llm.py": "streams are put together outside of engines",
    "lockstep/chat.py": "conversations are put together outside of engines",
    "optimized/kernels": "an engine on a CPU runs none of the kernels",
}
#: Faults that no engine shows, and why.
UNSEEN = {
    "M9-optimized": "an engine never names a block twice in one call",
    "M104": "arrays are right wherever they lie; only a graph minds their places",
    "M111": "what padding holds is undefined, and compared with nothing",
    "M126": "rows come in parts where they have more logits than small models give",
    "M127": "a second read gives the same; only their count tells",
    "M138": "none decodes more requests than its steps have tokens, unless imported",
    "M137": "an engine replaces both lists at once, and the other's change is noticed",
    "M147": "nothing differs but the time, and no engine on a CPU replays a graph",
    "M148": "no step of a scene is interrupted",
    "M149": "no step of a scene raises to its caller",
    **dict.fromkeys(
        ("M105", "M106", "M107"),
        "both sides share the rule, and which shape hosts a step changes no number",
    ),
}


class Way(NamedTuple):
    """A way to look for a fault.

    Attributes:
        options: Of the engine that has it.
        oracle: What it is held to.
        bitwise: Whether by the bit, drawing its own tokens.
        free_running: Whether it goes on from its own state, with all that it keeps.
    """

    options: dict[str, Any]
    oracle: Side
    bitwise: bool
    free_running: bool = False


#: A fault in the reference is seen by the bit; so is one of the optimized side that
#: stays within its class or in padding, beside the same side without it.
_PADDED = {"graphs": "padded"}
REFERENCE_WAYS = (Way({}, Side(), True),)
FAST_WAYS = (
    Way(_PADDED, Side(), False),
    Way({}, Side(), False),
    Way(_PADDED, Side("optimized", options=_PADDED), True, True),
)


def find(root: Path, name: str) -> Mutant:
    """Find an entry of the list by its id.

    Raises:
        SystemExit: There is none.
    """
    mutants = {mutant.id: mutant for mutant in load(root)}
    if name not in mutants:
        known = ", ".join(mutants)
        print(f"error: no mutant is named {name!r}; known are {known}", file=sys.stderr)
        # One means that a fault was found.
        raise SystemExit(2)
    return mutants[name]


def why_unseen(mutant: Mutant) -> str:
    """Say why no engine on a CPU can have a fault; empty if one can."""
    if mutant.needs_gpu:
        return "only a GPU shows it"
    outside = OUTSIDE.get(mutant.file) or OUTSIDE.get(str(Path(mutant.file).parent), "")
    return UNSEEN.get(mutant.id, outside)


def try_mutant(root: Path, mutant: Mutant) -> tuple[str, Verdict]:
    """Run the verifier until it finds a fault or has no scene left.

    Returns:
        The name of the scene, and the verdict.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        side = mutated_side(root, mutant, Path(folder))
        is_fast = mutant.file.startswith("optimized/")
        found = "", Verdict()
        ways = FAST_WAYS if is_fast else REFERENCE_WAYS
        for way, (name, scene) in product(ways, scenes().items()):
            verdict = verify(
                replace(side, options=way.options),
                oracle=way.oracle,
                workload=scene.workload,
                model=MODELS[scene.model],
                bitwise=way.bitwise,
                free_running=way.free_running,
            )
            found = name, verdict
            if not verdict.equal:
                break
        return found


def is_of_side(mutant: Mutant) -> bool:
    """Tell whether a fault is in a side, not in the vocabulary."""
    return mutant.file.partition("/")[0] in SIDES


def mutated_side(root: Path, mutant: Mutant, folder: Path) -> Side:
    """Copy what a fault is in, apply it, and load the copy."""
    if is_of_side(mutant):
        name = mutant.file.partition("/")[0]
        shutil.copytree(root / name, folder / name)
        write_fault(folder / mutant.file, mutant)
        load_package(f"lockstep.{BACKEND}", folder / name)
        assemble.BACKENDS = (*assemble.BACKENDS, BACKEND)
        return Side(BACKEND)
    package = folder / COPY
    ignored = shutil.ignore_patterns("demo_model", "__pycache__")
    shutil.copytree(root / "lockstep", package, ignore=ignored)
    write_fault(package / mutant.file.partition("/")[2], mutant)
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\blockstep\b", COPY, text), encoding="utf-8")
    load_package(COPY, package)
    return Foreign(mixes=False)


def write_fault(path: Path, mutant: Mutant) -> None:
    """Apply a fault to a file."""
    text = mutant.apply(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def load_package(name: str, folder: Path) -> None:
    """Load a package from a folder under a name."""
    spec = spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


class Foreign(Side):
    """The reference of a copy of the package, whose classes are others."""

    def parts(self, setup: Setup) -> dict[str, Any]:
        """List the copy's components."""
        interfaces = importlib.import_module(f"{COPY}.interfaces")
        built = importlib.import_module(f"{COPY}.assemble").build_components(
            self.backend
        )
        return {
            key: getattr(built, key.partition(".")[2])
            for key in interfaces.component_keys()
        }

    def build(self, setup: Setup, components: Mapping[str, Any]) -> Any:
        """Build the copy's engine."""
        module = importlib.import_module(f"{COPY}.assemble")
        own = translate(tuple(setup[:4]), "lockstep", COPY)
        return Interpreter(
            module.build_engine(*own, setup.device, self.backend, components)
        )

    def __str__(self) -> str:
        """Name it."""
        return f"{self.backend} with a mutated vocabulary"


class Interpreter:
    """An engine of the copy that understands, and gives, objects of the original."""

    def __init__(self, engine: Any) -> None:
        """Wrap an engine."""
        self.engine, self.history = engine, list[Any]()
        self.scheduler = Scheduler(engine.scheduler)
        self.components, self.model = engine.components, engine.model
        self.sizes = engine.sizes

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.engine.has_work

    def add(self, prompt: list[int], sampling: Any, name: str) -> str:
        """Put a request into the queue."""
        try:
            return self.engine.add(prompt, to_copy(sampling), name)
        except Exception as error:
            raise RequestError(str(error)) from error

    def abort(self, name: str, *reason: Any) -> Any:
        """End a request."""
        return to_original(self.engine.abort(name, *to_copy(reason)))

    def step(self, plan: Any, tokens: Mapping[str, int]) -> Any:
        """Run one step."""
        return to_original(self.engine.step(plan=to_copy(plan), tokens=tokens))

    def export_state(self) -> Any:
        """Copy everything that the engine knows."""
        return to_original(self.engine.export_state())

    def import_state(self, state: Any) -> None:
        """Take over a state."""
        self.engine.import_state(to_copy(state))


class Scheduler:
    """The part of a scheduler that the verifier speaks with."""

    def __init__(self, scheduler: Any) -> None:
        """Wrap a scheduler."""
        self.scheduler = scheduler
        self.find = scheduler.find

    def plan(self, recorded: Any = None) -> Any:
        """Make a plan, or follow one."""
        return to_original(self.scheduler.plan(to_copy(recorded)))

    @property
    def solo(self) -> list[tuple[Any, int]]:
        """Requests that must run alone."""
        return self.scheduler.solo

    @solo.setter
    def solo(self, pairs: list[tuple[Any, int]]) -> None:
        self.scheduler.solo = pairs


def translate(value: Any, source: str, target: str) -> Any:
    """Copy a value, with classes of one package in place of another's; not tensors."""
    tensors: list[Tensor] = []
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)

    def remember(value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value)
        return len(tensors) - 1

    pickler.persistent_id = remember
    pickler.dump(value)

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            head, dot, rest = module.partition(".")
            return super().find_class(
                (target if head == source else head) + dot + rest, name
            )

        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return Reader(io.BytesIO(stream.getvalue())).load()


to_copy = partial(translate, source="lockstep", target=COPY)
to_original = partial(translate, source=COPY, target="lockstep")


# Many.


@dataclass(frozen=True)
class Found:
    """What became of a mutant.

    Attributes:
        id: Its id.
        where: The first difference; empty for none.
        blame: Component to blame.
        scene: In which it was seen.
        note: Why there can be no difference, or what went wrong.
    """

    id: str
    where: str = ""
    blame: str = ""
    scene: str = ""
    note: str = ""


def report(root: Path, name: str) -> Found:
    """Try one, in this process."""
    mutant = find(root, name)
    if reason := why_unseen(mutant):
        return Found(name, note=reason)
    try:
        scene, verdict = try_mutant(root, mutant)
    except Exception as error:
        # The fault keeps the engine from being built or asked.
        return Found(name, note=f"{type(error).__name__}: {error}")
    found = verdict.difference
    if found is None:
        return Found(name, note="no difference")
    shared = "" if is_of_side(mutant) else f"{mutant.file}, which both sides share"
    return Found(name, str(found), found.blame or shared, scene)


def report_each(names: Sequence[str], jobs: int) -> Iterator[Found]:
    """Try some at a time, each in a process forked from this one."""
    # What each would import first.
    importlib.import_module("lockstep.llm")
    for side in SIDES:
        assemble.build_components(side)
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap(partial(report, ROOT), names)


def show_one(mutant: Mutant) -> int:
    """Print the whole verdict on one; return the exit status."""
    console = Console(highlight=False)
    console.print(f"{mutant.id}: {mutant.name} ({mutant.file})\n", markup=False)
    scene, verdict = try_mutant(ROOT, mutant)
    console.print(f"scene    {scene}", markup=False)
    show(verdict, console)
    if not is_of_side(mutant):
        console.print("The oracle has a vocabulary of its own here.", style="dim")
    return int(not verdict.equal)


def show_all(found: Sequence[Found], mutants: Sequence[Mutant]) -> int:
    """Print a table; return the exit status."""
    table = Table(title="What the verifier says of each fault")
    for column in ("id", "fault", "first difference", "to blame"):
        table.add_column(column, overflow="fold")
    for each, mutant in zip(found, mutants, strict=True):
        table.add_row(each.id, mutant.name, each.where or each.note, each.blame)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    of_engines = [mutant.id for mutant in mutants if not why_unseen(mutant)]
    seen = [each.id for each in found if each.where]
    missed = sorted(set(of_engines) - set(seen))
    print(
        f"{len(seen)} of {len(of_engines)} found; missed: {', '.join(missed) or 'none'}"
    )
    return int(bool(missed))


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Let the verifier find known faults.")
    parser.add_argument("names", nargs="*", help="ids of mutants")
    parser.add_argument("--all", action="store_true", help="try each")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mutants = load(ROOT) if options.all else [find(ROOT, n) for n in options.names]
    if options.json:
        print(json.dumps(asdict(report(ROOT, mutants[0].id))))
        return 0
    if len(mutants) == 1 and not why_unseen(mutants[0]):
        return show_one(mutants[0])
    found: list[Found] = []
    for each in report_each([mutant.id for mutant in mutants], options.jobs):
        print(each, file=sys.stderr, flush=True)
        found.append(each)
    return show_all(found, mutants)


if __name__ == "__main__":
    sys.exit(main())
