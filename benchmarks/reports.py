"""Tables, files and plots of what was measured; plots alone need matplotlib.

Pages hold tables that are printed from committed results, each beneath a comment that
names it. When results are measured again, this puts the new ones in place:

    python -m benchmarks.reports
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lockstep.cli import make_folder

ROOT = Path(__file__).resolve().parents[1]
#: What the numbers of a ladder are.
LADDER_NOTES = {
    "tokens_per_second": "all tokens that are computed, of prompts and new ones, each "
    "kind at its measured rate and in the workload's proportion",
    "share_of_floor": "least time of what was measured, over the time it took",
    "measured": "no less than that of the rung before; both times of a rung are of it",
    "per_step": "of one step of each kind, with prompts and blocks as of `counted`: a "
    "prefill that stores a state within each prompt, and a decode that stores one of "
    "each row, at the end of a block",
    "launches": "calls that start kernels; a graph's replay is one",
    "kernels": "kernels that ran, those within graphs too",
    "copies": "copies between host and device, either way; none within the device",
    "copied_bytes": "bytes of these copies",
    "seconds": "all that a rung took, by the clock on the wall",
}
#: Colours of the two kinds of steps, told apart by anybody.
COLOURS = {"prefill": "#0072b2", "decode": "#e69f00"}


def show_ladder(found: Mapping[str, Any], console: Console) -> None:
    """Print a table of what was found."""
    load = "{prompts} x {prompt_tokens} + {new_tokens} tokens".format(
        **found["workload"]
    )
    title = (
        f"{found['model']}, {found['dtype']}, {load}, {found['environment']['device']}"
    )
    names = (
        "launches",
        "kernels",
        "copies",
        "copied_bytes",
        "operations",
        "host_reads",
    )
    steps, counted = _decodes(found, names)
    if counted:
        kinds = ", ".join(counted).replace("_", " ")
        title += f"\n{kinds}: of one step that decodes {steps[0]['tokens']} tokens"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("rung", no_wrap=True)
    for column in ("tokens/s", "decodes/s", "of floor", *counted):
        table.add_column(column.replace("_", "\n"), justify="right")
    for row in found["rungs"]:
        if row["status"] != "equal":
            table.add_row(row["rung"], style="dim")
            continue
        step = row["per_step"].get("decode", {})
        table.add_row(
            row["rung"] + " (cut)" * row["is_cut"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['decode_steps_per_second']:,.1f}",
            f"{row['share_of_floor']:.2%}",
            *(f"{step.get(key) or 0:,}" for key in counted),
        )
    console.print(table)
    for row in found["rungs"]:
        if row["reason"]:
            text = f"{row['rung']} ({row['status']}): {row['reason']}"
            console.print(text, markup=False)


def write(
    found: Mapping[str, Any],
    name: str,
    device: torch.device,
    folder: Path | None,
    draw: Callable[[Mapping[str, Any], Path], object],
    notes: Console,
) -> None:
    """Write JSON, and a plot beside it if there is matplotlib.

    Args:
        found: What was measured.
        name: Of the files, which ends in that of the device.
        device: Where.
        folder: Where the files go; None for nowhere.
        draw: Draws a plot into a file.
        notes: Is told what was written.
    """
    path = write_json(found, name, device, folder)
    if path is None:
        return
    notes.print(f"wrote {path}")
    try:
        draw(found, path.with_suffix(".svg"))
    except ModuleNotFoundError as error:
        notes.print(f"no plot: {error}; pip install matplotlib")


def write_json(
    found: Mapping[str, Any], name: str, device: torch.device, folder: Path | None
) -> Path | None:
    """Write JSON alone, so that what comes later can lose nothing of it.

    Args:
        found: As of `write`, and so all others.
        name: Of the file.
        device: Where.
        folder: Where the file goes; None for nowhere.

    Returns:
        The file's path.
    """
    if folder is None:
        return None
    path = find_path(name, device, folder)
    make_folder(folder)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return path


def find_path(name: str, device: torch.device, folder: Path) -> Path:
    """Name the file of what is measured on a device."""
    words = ["cpu"]
    if device.type == "cuda":
        # Without the maker, who comes first.
        words = torch.cuda.get_device_name(device).lower().split()[1:]
    return folder / f"{name}_{'-'.join(words)}.json"


def draw_ladder(found: Mapping[str, Any], path: Path) -> None:
    """Draw the tokens a second of every rung, prefill and decode, from the top.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    rows = [row for row in found["rungs"] if row["status"] == "equal"]
    figure = new_figure(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    for shift, (kind, colour) in enumerate(COLOURS.items()):
        places = [place + 0.4 * shift - 0.2 for place in range(len(rows))]
        speeds = [row.get(f"{kind}_tokens_per_second", 0) for row in rows]
        bars = axes.barh(places, speeds, 0.38, color=colour, label=kind)
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, size=7)
    if rows:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    load = "{prompts} x {prompt_tokens} + {new_tokens}".format(**found["workload"])
    axes.set_xlabel(f"tokens a second; {load} tokens, {found['dtype']}")
    axes.set_title(f"{found['model']} on {found['environment']['device']}")
    # Slow rungs leave room there.
    axes.legend(loc="upper right")
    save(figure, path)


def ladder_table(found: Mapping[str, Any]) -> str:
    """Write the rungs as Markdown: their speeds, and what a step that decodes takes."""
    names = "operations", "launches", "copies", "host_reads"
    _, counted = _decodes(found, names)
    words = [name.replace("_", " ") for name in counted]
    head = ["rung", "prefill", "decode", "of the floor", *words, "timed on"]
    lines: list[list[str]] = []
    for row in found["rungs"]:
        if row["status"] != "equal":
            lines.append([row["rung"], row["status"], *[""] * (len(head) - 2)])
            continue
        kinds = "prefill", "decode"
        speeds = (row[f"{kind}_tokens_per_second"] for kind in kinds)
        step, load = row["per_step"]["decode"], row["measured"]
        lines.append(
            [
                _name(row) + " (idle)" * bool(row["reason"]),
                *(f"{speed:,.0f}" for speed in speeds),
                f"{row['share_of_floor']:.2%}",
                *(f"{step[name]:,}" for name in counted),
                f"{load['prompt_tokens']} + {load['new_tokens']}",
            ]
        )
    return _markdown(head, lines)


def claims_table(
    found: Mapping[str, Any], part: str, *more: str, key: str = "ms"
) -> str:
    """Write a part as Markdown: a line for each form, a column for each size.

    Args:
        found: As of `write`.
        part: Name of the part.
        more: What else is told of each form, at the first size, if it is known.
        key: What is told at each size; milliseconds that are all below two are told as
            microseconds.
    """
    rows = [row for row in found["parts"][part] if key in row]
    works = list(dict.fromkeys(row["work"] for row in rows))
    by_place = {(row["form"], row["work"]): row for row in rows}
    unit, factor, of = key, 1, "for tokens"
    if key in ("ms", "decode_ms"):
        is_short = max(row[key] for row in rows) < 2
        unit, factor = ("µs", 1000) if is_short else ("ms", 1)
        of = "a step after tokens" if key == "decode_ms" else of
    more = tuple(name for name in more if rows[0].get(name) is not None)
    names = [name.replace("_", " ") for name in more]
    lines: list[list[str]] = []
    for form in dict.fromkeys(row["form"] for row in rows):
        mine = [by_place[form, work] for work in works]
        numbers = [factor * row[key] for row in mine]
        is_whole = all(isinstance(number, int) for number in numbers)
        told = [f"{n:,.0f}" if n >= 100 or is_whole else f"{n:#.3g}" for n in numbers]
        lines.append([form, *told, *(f"{mine[0][name]:.3g}" for name in more)])
    return _markdown([f"{unit} {of}", *works, *names], lines)


def origins_table(
    what: str, environments: Mapping[str, Mapping[str, Any]], *more: str
) -> str:
    """Write as Markdown where, with what and when something was measured.

    Args:
        what: Names the first column.
        environments: As of `benchmarks.reference_speed`, by what was measured.
        more: What else each of them says.
    """
    names = *more, "device", "torch", "triton", "commit", "date"
    lines = [
        [
            which,
            *(
                str(found[name])[:7] if name == "commit" else str(found[name])
                for name in names
            ),
        ]
        for which, found in environments.items()
    ]
    return _markdown([what, *names], lines, numbers=False)


def page_tables(results: Path) -> dict[str, dict[str, str]]:
    """Print the tables of all pages, by page and by the comment above each.

    Args:
        results: A folder of committed results.
    """
    claims, gpu, cpu = (
        json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("claims_h200", "ladder_h200", "ladder_cpu")
    )
    table = partial(claims_table, claims)
    ladders = {"H200": gpu, "CPU": cpu}
    about = {
        which: {
            **found["environment"],
            "model": f"{found['model']}, {found['parameters']:,} parameters",
            "dtype": found["dtype"],
            "tokens": "{prompts} x {prompt_tokens} + {new_tokens}".format(
                **found["workload"]
            ),
        }
        for which, found in ladders.items()
    }
    return {
        "docs/claims.md": {
            "parts": origins_table("part", claims["environments"]),
            "tiles": table("tiles", "registers", "spills", "occupancy"),
            "tiles, programs": table("tiles", key="programs"),
            "staging": table("staging", "staged_rows"),
            "graphs": table("graphs"),
            "streams": table("streams"),
            "streams, decode": table("streams", key="decode_ms"),
            "bookkeeping": table("bookkeeping", "host_reads", "launches", "copies"),
        },
        "docs/ladder.md": {
            "machines": origins_table("on", about, "model", "dtype", "tokens"),
            **{which: ladder_table(found) for which, found in ladders.items()},
        },
    }


def renew(page: str, tables: Mapping[str, str]) -> str:
    """Put each table of a page beneath the comment that names it."""
    return re.sub(
        r"^<!-- (.+) -->\n(?:\|.*\n)*",
        lambda found: f"<!-- {found[1]} -->\n{tables[found[1]]}",
        page,
        flags=re.M,
    )


def draw_claims(found: Mapping[str, Any], path: Path) -> None:
    """Draw every part: milliseconds of its forms at all sizes, and of decodes.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    parts = {
        name: [row for row in rows if "ms" in row]
        for name, rows in found["parts"].items()
    }
    for name, rows in [*parts.items()]:
        decodes = [row | {"ms": row["decode_ms"]} for row in rows if "decode_ms" in row]
        parts[f"{name}: a step that decodes"] = decodes
    parts = {name: rows for name, rows in parts.items() if rows}
    lines = max(1, -(-len(parts) // 2))
    figure = new_figure(figsize=(12, 4 * lines), layout="constrained")
    figure.suptitle(f"{found['shape']} on {found['environment']['device']}")
    for place, (name, rows) in enumerate(parts.items()):
        axes = figure.add_subplot(lines, 2, place + 1)
        works = list(dict.fromkeys(row["work"] for row in rows))
        forms = list(dict.fromkeys(row["form"] for row in rows))
        for turn, form in enumerate(forms):
            mine = {row["work"]: row["ms"] for row in rows if row["form"] == form}
            places = [works.index(work) for work in mine]
            if all(work.isdigit() for work in works):
                axes.loglog(list(map(int, mine)), [*mine.values()], "o-", label=form)
                continue
            shifted = [place + (turn + 0.5) / (len(forms) + 1) for place in places]
            bars = axes.bar(shifted, [*mine.values()], 1 / (len(forms) + 1), label=form)
            axes.bar_label(bars, fmt="%.3g", padding=2, size=7)
            axes.set_xticks([place + 0.45 for place in range(len(works))], works)
        axes.set_ylabel("ms")
        axes.set_xlabel("tokens")
        axes.set_title(name)
        axes.margins(y=0.3)
        axes.legend(fontsize=8)
    save(figure, path)


def new_figure(**options: Any) -> Any:
    """Make an empty figure; options are those of matplotlib's."""
    return import_module("matplotlib.figure").Figure(**options)


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes for the same numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with import_module("matplotlib").rc_context(
        {"svg.hashsalt": path.stem, "svg.fonttype": "none"}
    ):
        names = ("Date", "Creator", "Format", "Type")
        metadata = dict.fromkeys(names) if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _name(row: Mapping[str, Any]) -> str:
    """Name a rung, and whether it was timed on less."""
    return f"{row['rung']} (cut)" if row["is_cut"] else row["rung"]


def _decodes(
    found: Mapping[str, Any], names: Iterable[str]
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """List a ladder's steps that decode, and which of some counts any of them has."""
    steps = [row["per_step"]["decode"] for row in found["rungs"] if "per_step" in row]
    return steps, [name for name in names if any(step.get(name) for step in steps)]


def _markdown(
    head: Sequence[str], lines: Iterable[Sequence[str]], numbers: bool = True
) -> str:
    """Write a table, whose columns but the first are numbers or not."""
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


if __name__ == "__main__":
    for name, tables in page_tables(ROOT / "benchmarks/results").items():
        text = (ROOT / name).read_text(encoding="utf-8")
        (ROOT / name).write_text(renew(text, tables), encoding="utf-8")
