"""Older forms beside what replaced them, on a published shape.

Each part takes up what was claimed for a change of Megatron-LM, whose hybrid engine had
such forms, and measures here what it is about; what is not equal is not timed.

* *staging*: a prefill's graph copies states at block boundaries through a buffer whose
  rows are sized by the requests that may run, by padded prompts, or by a count on the
  device; beside states stored in place.
* *tiles*: the convolution of a prefill in tiles of several sizes.
* *bookkeeping*: a step's tables, index arrays and copies in loops, or all at once.
* *graphs*: a prefill that stores states, run eagerly or as a graph.
* *streams*: shared experts beside the routed ones, or before them, also in decode.

On a CPU a tiny model goes through the same, but for what takes a GPU or Triton.

    python -m benchmarks.claims --output benchmarks/results
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from benchmarks import reports
from benchmarks.counting import counting
from benchmarks.reference_speed import environment
from benchmarks.serving import Load, add, choose_clock, free, serve
from benchmarks.shapes import SHAPES
from lockstep import EngineConfig, RandomWeights
from lockstep.assemble import build_engine, settle_options
from lockstep.cli import make_folder
from lockstep.config import ModelConfig
from lockstep.errors import ConfigError
from lockstep.families import read_model_config
from lockstep.llm import find_device
from lockstep.memory import plan_memory, torch_dtype
from lockstep.parameters import make_parameters
from lockstep.plan import BatchShape
from lockstep.verify.compare import BUDGETS, SHORT_FACTOR, UNIT_ROUNDOFF, row_errors

console = Console()
notes = Console(stderr=True, highlight=False, soft_wrap=True)

#: What was claimed, and where.
CLAIMS = {
    "tiles": "Megatron-LM pull request 4764: tiles of 8 x 256 and 128 x 128 occupy a "
    "GPU better than 128 x 64, 128 x 128, 256 x 64 and 256 x 128",
    "staging": "Megatron-LM pull request 4764: rows by padded prompts instead of by "
    "max_requests make a graphed prefill of a Nemotron nano model 30 % faster",
    "graphs": "Megatron-LM pull request 3922: a prefill that stores states can be a "
    "graph",
    "streams": "Megatron-LM pull request 4764: shared experts are hidden behind routed "
    "ones on a stream of their own",
    "bookkeeping": "Megatron-LM pull request 3922: a step of 8 prompts that store 2 "
    "states each reads from the device about 3 times instead of about 24",
}
#: A tiny model of the same pattern, for machines without a GPU.
TINY: dict[str, Any] = SHAPES["nano3"] | {
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "hidden_size": 16,
    "hybrid_override_pattern": "MEM*",
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 4,
    "chunk_size": 16,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "n_routed_experts": 8,
    "torch_dtype": "float32",
}
#: Tokens of a prompt, requests that might run, and prompts at once.
LIMITS = {"large": (512, 128, (1, 8, 16)), "tiny": (32, 4, (1, 2))}
#: Timed prefills of a form, after some that warm up, which are compared.
TIMES, WARM_UPS = 10, 2
#: Steps of a decode that is timed.
DECODES = 32
_FORMS = "benchmarks.ladder"
STAGING: dict[str, dict[str, Any]] = {
    "in place": {},
    "by max_requests": {"model.Model": f"{_FORMS}.staged_copies:ModelByRequests"},
    "by padded prompts": {"model.Model": f"{_FORMS}.staged_copies:ModelByPrefills"},
    "by a device count": {"model.Model": f"{_FORMS}.counted_copies:ModelByCount"},
}
_LOOPS: dict[str, Any] = {
    "scheduler.Scheduler": "reference",
    "prefix_cache.PrefixCache": "reference",
    "kv_blocks.BlockPool": "reference",
    "state_slots.StateSlots": "reference",
    "metadata.MetadataBuilder": "reference",
    "snapshots.copy_states": f"{_FORMS}.loop_copies:copy_states",
    "model.Model": f"{_FORMS}.staged_copies:ModelWithLoop",
}
BOOKKEEPING: dict[str, dict[str, Any]] = {
    "one copy": {},
    "an array at a time": {
        "metadata.MetadataBuilder": f"{_FORMS}.single_transfers:MetadataBuilder"
    },
    "loops": _LOOPS,
    "loops, tables on the device": _LOOPS
    | {
        "kv_blocks.BlockPool": f"{_FORMS}.scalar_reads:BlockPool",
        "state_slots.StateSlots": f"{_FORMS}.scalar_reads:StateSlots",
    },
}
#: Tokens that are convolved, in rows of at most this many.
TOKENS = (1, 8, 64, 512, 1024, 2048, 4096, 8192, 32768)
ROW_TOKENS = 512
#: Programs that an SM of this kind of GPU holds at most.
MOST_PROGRAMS = 32


class Seen(NamedTuple):
    """What a prefill left behind, and how it was run.

    Attributes:
        tokens: Tokens drawn.
        states: States stored, by layer and slot.
        mode: As of `StepRecord`.
    """

    tokens: list[int]
    states: Tensor
    mode: str


@dataclass
class Bench:
    """A model whose parameters all engines share, and what it is given.

    Attributes:
        config: The model.
        device: Where it runs.
        prompt_tokens: Tokens of every prompt.
        max_requests: Requests that might run.
        prompts: Prompts of each prefill.
    """

    config: ModelConfig
    device: torch.device
    prompt_tokens: int
    max_requests: int
    prompts: Sequence[int]

    def __post_init__(self) -> None:
        """Draw the parameters."""
        self.dtype = torch_dtype(self.config.dtype)
        self.is_cuda = self.device.type == "cuda"
        fill = RandomWeights(seed=0).fill
        self.parameters = make_parameters(self.config, self.dtype, self.device, fill)

    def build(
        self,
        prompts: Sequence[int],
        graphs: str,
        components: dict[str, Any] | None = None,
        max_requests: int | None = None,
        side_stream: bool = False,
        decodes: int = 0,
    ) -> Any:
        """Build an engine whose padded shapes are those of some prefills alone.

        Args:
            prompts: Prompts of each.
            graphs: As of `EngineConfig`.
            components: Components that are replaced.
            max_requests: Requests that might run.
            side_stream: As of `EngineConfig`.
            decodes: Steps that decode behind each prefill, which have shapes then.
        """
        most = max(prompts)
        config = EngineConfig(
            max_requests=max_requests or self.max_requests,
            max_tokens_per_step=most * self.prompt_tokens,
            max_length=self.prompt_tokens + 1 + decodes,
            num_blocks=8 * most * max(1, self.prompt_tokens // 128),
            snapshot_slots=3 * most,
            graphs=graphs,  # type: ignore[arg-type]
            side_stream=side_stream,
        )
        config = settle_options(config, "optimized", self.device)
        sizes = plan_memory(self.config, config, self.device, self.dtype)
        shapes = [BatchShape(n * self.prompt_tokens, n, 0) for n in prompts]
        shapes += [BatchShape(n, 0, n) for n in prompts if decodes]
        if sizes.graph_shapes:
            sizes = replace(sizes, graph_shapes=tuple(sorted(shapes)))
        given = self.config, config, sizes, self.parameters, self.device
        return build_engine(*given, "optimized", components)

    def load(self, prompts: int) -> Load:
        """Return a workload that is one prefill."""
        return Load(prompts, self.prompt_tokens, 1)

    def see(self, engine: Any, prompts: int) -> Seen:
        """Run a prefill, and copy what it left behind."""
        add(engine, self.load(prompts), seed=0)
        record = engine.step()
        if record.failed:
            raise RuntimeError(f"a request failed: {record.failed}")
        slots = sorted(s.slot_id for row in record.rows for s in row.snapshots)
        states = engine.caches.ssm[:, slots].clone()
        return Seen([*record.tokens.values()], states, record.mode)

    def difference(self, mine: Seen, theirs: Seen) -> str:
        """Say how two prefills differ; states may by their class."""
        if mine.tokens != theirs.tokens:
            return f"tokens {mine.tokens} instead of {theirs.tokens}"
        if mine.states.shape != theirs.states.shape:
            return "other states are stored"
        unit = UNIT_ROUNDOFF[self.dtype]
        factor = SHORT_FACTOR if unit > UNIT_ROUNDOFF[torch.float32] else 1.0
        bound = factor * BUDGETS["ssm states"] * unit
        pairs = zip(mine.states, theirs.states, strict=True)
        error = max(float(row_errors(*pair).max()) for pair in pairs)
        return f"states are {error:.1e} off" if error > bound else ""

    def time(self, engine: Any, prompts: int) -> float:
        """Return the median milliseconds of a prefill from an empty cache."""
        runs = [serve(engine, self.load(prompts), n) for n in range(TIMES + WARM_UPS)]
        return 1e3 * median(run.total for run in runs[WARM_UPS:])

    def time_decode(self, engine: Any, prompts: int) -> float:
        """Return the median milliseconds of a step that decodes."""
        load = replace(self.load(prompts), new_tokens=1 + DECODES)
        runs = [serve(engine, load, n) for n in range(3 + WARM_UPS)]
        return 1e3 * median(run.seconds["decode"] / DECODES for run in runs[WARM_UPS:])


Row = dict[str, Any]


def compare(
    bench: Bench,
    prompts: Sequence[int],
    forms: Mapping[str, Callable[[], Any]],
    has_decodes: bool = False,
) -> Iterator[Row]:
    """Time forms of an engine, of which the first is right.

    Args:
        bench: The model.
        prompts: Prompts of each prefill.
        forms: Build the engines, one after the other, by name.
        has_decodes: Whether steps that decode are timed, too.
    """
    right: dict[int, Seen] = {}
    base: dict[int, float] = {}
    for name, build in forms.items():
        engine = build()
        for count in prompts:
            row: Row = {"form": name, "work": f"{count} x {bench.prompt_tokens}"}
            seen = bench.see(engine, count)
            reason = bench.difference(seen, right.setdefault(count, seen))
            bits = torch.equal(seen.states, right[count].states)
            row |= {"mode": seen.mode, "bit_for_bit": bits}
            row["stored_states"] = seen.states.shape[1]
            if reason:
                yield row | {"unequal": reason}
                continue
            time = bench.time(engine, count)
            row |= {"ms": time, "ratio": time / base.setdefault(count, time)}
            if has_decodes:
                row["decode_ms"] = bench.time_decode(engine, count)
            yield row
        del engine
        free(bench.device)


def staging(bench: Bench) -> Iterator[Row]:
    """Compare sizes of the staging buffer, by graphs where there are any."""
    prompts, mode = bench.prompts, "all" if bench.is_cuda else "padded"
    forms = dict(STAGING)
    if not _has_triton(bench):
        del forms["by a device count"]
        yield {"form": "by a device count", "skipped": "it needs Triton"}
    builds = {n: partial(bench.build, prompts, mode, p) for n, p in forms.items()}
    for row in compare(bench, prompts, builds):
        staged = {
            "in place": 0,
            "by max_requests": 3 * bench.max_requests,
            "by a device count": row["stored_states"],
        }.get(row["form"], 3 * int(row["work"].split()[0]))
        yield row | {"staged_rows": staged, "max_requests": bench.max_requests}


def graphs(bench: Bench) -> Iterator[Row]:
    """Compare ways to run a prefill that stores states."""
    prompts = bench.prompts
    modes = ["all", "padded", "off"] if bench.is_cuda else ["padded", "off"]
    if not bench.is_cuda:
        yield {"form": "all", "skipped": "graphs need a GPU"}
    most = max(prompts)
    builds = {mode: partial(bench.build, prompts, mode, {}, most) for mode in modes}
    yield from compare(bench, prompts, builds)


def streams(bench: Bench) -> Iterator[Row]:
    """Compare one stream with two."""
    mode, forms = "all", {"one stream": False, "shared experts on a side stream": True}
    if not bench.is_cuda:
        yield {"form": "shared experts on a side stream", "skipped": "it needs a GPU"}
        mode, forms = "padded", {"one stream": False}
    most = max(bench.prompts)
    build = partial(bench.build, bench.prompts, mode, {}, most, decodes=DECODES)
    builds = {name: partial(build, side_stream=on) for name, on in forms.items()}
    yield from compare(bench, bench.prompts, builds, has_decodes=True)


def bookkeeping(bench: Bench) -> Iterator[Row]:
    """Compare loops with what replaced them; steps are eager, as loops need it.

    Steps are counted when all are timed.
    """
    prompts = bench.prompts[1]
    builds = {
        name: partial(bench.build, [prompts], "off", parts, prompts)
        for name, parts in BOOKKEEPING.items()
    }
    for row in [*compare(bench, [prompts], builds)]:
        engine = builds[row["form"]]()
        bench.see(engine, prompts)
        add(engine, bench.load(prompts), seed=1)
        with counting(bench.device) as counts:
            engine.step()
        names = "host_reads", "launches", "copies", "copied_bytes", "why_none"
        yield row | {name: getattr(counts, name) for name in names}
        del engine
        free(bench.device)


# The convolution alone.


def tiles(device: torch.device) -> Iterator[Row]:
    """Time the convolution in tiles of each size, and say how they fill the GPU."""
    if device.type != "cuda":
        yield {"form": "all", "skipped": "kernels are timed and occupy on a GPU alone"}
        return
    from benchmarks.kernels import ROTATED, time_calls
    from benchmarks.kernels_mamba import CHANNELS
    from benchmarks.ladder import large_tiles
    from lockstep.optimized.kernels import conv1d

    def bind(tile: Any, count: int) -> Callable[[], Tensor]:
        given = conv_inputs(count, CHANNELS, device)
        if tile is None:
            return partial(conv1d.conv_prefill, *given)
        # Layers shared these, so they are no part of the time.
        ready = large_tiles.prepare(given[0], *given[3:])
        return partial(large_tiles.convolve, *given, tile=tile, prepared=ready)

    sizes = (*large_tiles.LARGE_TILES, *large_tiles.LATER_TILES)
    forms: dict[str, Any] = {"scan chunks": None}
    forms |= {f"{t.tokens} x {t.channels}, {t.warps} warps": t for t in sizes}
    for count in TOKENS:
        expected, base, num_bytes = None, None, 4 * count * CHANNELS
        for name, tile in forms.items():
            row: Row = {"form": name, "work": f"{count}"}
            copies = max(1, min(32, ROTATED // num_bytes))
            calls = [bind(tile, count) for _ in range(copies)]
            with (
                spied(conv1d, "_prefill_kernel") as now,
                spied(large_tiles, "_tile_kernel") as then,
            ):
                outputs = calls[0]()
            expected = outputs.clone() if expected is None else expected
            error = float(row_errors(outputs, expected).max())
            row["bit_for_bit"] = torch.equal(outputs, expected)
            if error > 2 * UNIT_ROUNDOFF[torch.bfloat16]:
                yield row | {"unequal": f"outputs are {error:.1e} off"}
                continue
            seconds = time_calls(calls, num_bytes)
            base = base or seconds
            row |= {"ms": 1e3 * seconds, "ratio": seconds / base}
            yield row | occupancy(*(now + then)[0], device)
            del calls, outputs
            free(device)


def conv_inputs(count: int, channels: int, device: torch.device) -> tuple[Any, ...]:
    """Draw inputs, filters, biases and windows, and lay out rows and chunks.

    Rows begin a prompt; each stores one state, at its end.
    """
    starts = torch.arange(0, count, ROW_TOKENS)
    ends = (starts + ROW_TOKENS).clamp(max=count)
    chunks = torch.arange(0, count, 128)
    rows = torch.arange(len(starts))

    def put(values: Tensor) -> Tensor:
        return values.to(device)

    batch = SimpleNamespace(
        cu_prefill_lens=put(torch.cat((starts, ends[-1:]))),
        prefill_slot_ids=put(rows),
        initial_slot_ids=put(torch.full_like(rows, 2 * len(rows))),
        snapshot_rows=put(rows),
        snapshot_ends=put(ends),
        snapshot_slot_ids=put(rows + len(rows)),
        cu_scan_chunks=put(torch.cat((chunks, ends[-1:]))),
        scan_chunk_rows=put(chunks // ROW_TOKENS),
    )
    generator = torch.Generator(device).manual_seed(count)

    def draw(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(generator=generator)

    windows = draw(2 * len(rows) + 2, channels, 3)
    return draw(count, channels), draw(channels, 4), draw(channels), windows, batch


@contextmanager
def spied(module: Any, name: str) -> Generator[list[tuple[int, Any]]]:
    """List the launches of a kernel: programs of each, and what was compiled for it."""
    launches: list[tuple[int, Any]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                compiled = kernel[grid](*args, **kwargs)
                launches.append((prod(grid), compiled))
                return compiled

            return launch

    kernel = getattr(module, name)
    with patch.object(module, name, Spy()):
        yield launches


def occupancy(programs: int, compiled: Any, device: torch.device) -> Row:
    """Say how many programs there are, and how many of them an SM can hold at once.

    Registers are given out to warps by 256; each program takes 1,024 bytes of shared
    memory besides its own.
    """
    gpu = torch.cuda.get_device_properties(device)
    metadata, found = compiled.metadata, {"programs": programs}
    registers = getattr(compiled, "n_regs", None)
    if not registers:
        return {**found, "occupancy": None, "why_none": "Triton names no registers"}
    most_warps = gpu.max_threads_per_multi_processor // 32
    per_warp = -(-registers * 32 // 256) * 256
    held = min(
        MOST_PROGRAMS,
        most_warps // metadata.num_warps,
        gpu.regs_per_multiprocessor // (per_warp * metadata.num_warps),
        gpu.shared_memory_per_multiprocessor // (metadata.shared + 1024),
    )
    return {
        **found,
        "registers": registers,
        "spills": compiled.n_spills,
        "shared_bytes": metadata.shared,
        "warps": metadata.num_warps,
        "programs_an_sm_holds": held,
        "occupancy": held * metadata.num_warps / most_warps,
        "filled": min(1.0, programs / (held * gpu.multi_processor_count)),
    }


def _has_triton(bench: Bench) -> bool:
    """Tell whether kernels run: on a GPU, or interpreted."""
    runs = bench.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return runs and find_spec("triton") is not None


def show(found: dict[str, Any]) -> None:
    """Print all parts in one table."""
    table = Table(box=None, pad_edge=False)
    for name in ("part", "form", "work", "ms", "ratio", "more"):
        is_number = name in ("work", "ms", "ratio")
        table.add_column(name, justify="right" if is_number else "left")
    known = ("form", "work", "ms", "ratio", "bit_for_bit", "why_none")
    for part, rows in found["parts"].items():
        for row in rows:
            more = [
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
                if key not in known and value not in (None, "")
            ]
            numbers = (f"{row[key]:.4g}" if key in row else "" for key in known[2:4])
            text = escape(", ".join(more))
            cells = part, row["form"], row.get("work", ""), *numbers, text
            table.add_row(*cells)
    console.print(table)
    every = (row for rows in found["parts"].values() for row in rows)
    for reason in dict.fromkeys(row.get("why_none") for row in every):
        if reason:
            console.print(f"some counts are missing: {reason}", markup=False)


def _sum_up(row: Row) -> str:
    """Say in a line what came of a form."""
    words = [row["form"], row.get("work", "")]
    words += [f"{row['ms']:.4g} ms"] if "ms" in row else []
    kinds = "skipped", "unequal"
    words += [f"({kind}: {row[kind]})" for kind in kinds if kind in row]
    return " ".join(word for word in words if word)


def main(
    shape: Annotated[
        str | None, typer.Option(help="nano3, dense4b or tiny; by the device")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help=", ".join(CLAIMS))] = None,
    commit: Annotated[
        str | None, typer.Option(help="the commit, where git cannot say")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="a folder for JSON and a plot")
    ] = None,
) -> None:
    """Measure all parts, and write them to one file as each is done."""
    try:
        where = find_device(device)
        make_folder(output)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    shape, shapes = shape or _own_shape(where), {**SHAPES, "tiny": TINY}
    # Steps are counted in the last part alone: no profiler is there before.
    chosen = [name for name in CLAIMS if not only or name in only]
    for name, known in (shape, shapes), *((part, CLAIMS) for part in only or ()):
        if name not in known:
            raise typer.BadParameter(
                f"there is no {name}; known are {', '.join(known)}"
            )
    is_tiny, model = shape == "tiny", read_model_config(shapes[shape])
    found: dict[str, Any] = {
        "environment": environment(where, commit),
        "shape": shape,
        "dtype": model.dtype,
        "clock": choose_clock(where)[0],
        "notes": {
            "ratio": "milliseconds beside those of the first form, which is today's",
            "ms": "median of whole steps, or of the kernels of a convolution",
        },
        "claims": CLAIMS,
        "environments": {},
        "parts": {},
    }
    if output is not None:
        keep_others(found, reports.find_path("claims", where, output), chosen)
    bench: Bench | None = None
    parts = {
        "staging": staging,
        "bookkeeping": bookkeeping,
        "graphs": graphs,
        "streams": streams,
    }
    for part in chosen:
        if part == "tiles":
            rows = tiles(where)
        else:
            if bench is None:
                bench = Bench(model, where, *LIMITS["tiny" if is_tiny else "large"])
                notes.print(f"{shape}: parameters are drawn")
            rows = parts[part](bench)
        found["environments"][part] = found["environment"]
        taken = found["parts"].setdefault(part, [])
        try:
            for row in rows:
                taken.append(row)
                notes.print(f"{part}: {_sum_up(row)}", markup=False)
        except Exception as error:
            # What was measured before is not lost.
            taken.append({"form": "", "failed": f"{type(error).__name__}: {error}"})
        free(where)
        reports.write(found, "claims", where, output, reports.draw_claims, notes)
    show(found)
    every = [row for rows in found["parts"].values() for row in rows]
    if any("unequal" in row or "failed" in row for row in every):
        raise typer.Exit(1)


def keep_others(found: dict[str, Any], path: Path, chosen: Sequence[str]) -> None:
    """Take over what a file of the same shape has of other parts, and of when.

    Args:
        found: Gets parts and environments.
        path: The file, if it is there.
        chosen: Parts that are measured anew.
    """
    if not path.exists() or len(chosen) == len(CLAIMS):
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if earlier["shape"] == found["shape"]:
        for name in CLAIMS:
            if name in earlier["parts"] and name not in chosen:
                found["parts"][name] = earlier["parts"][name]
                own = earlier.get("environments", {})
                found["environments"][name] = own.get(name, earlier["environment"])


def _own_shape(device: torch.device) -> str:
    """Choose a shape by the device."""
    return "nano3" if device.type == "cuda" else "tiny"


if __name__ == "__main__":
    typer.run(main)
