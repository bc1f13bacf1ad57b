"""Train several recipes at once on one GPU and keep the best one's files.

The model is small enough that one run leaves most of a large GPU idle.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from keep import RECORD, best_of, keep_best
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RECIPES = [
    {"dropout": 0.1, "epochs": 30},
    {"dropout": 0.2, "epochs": 50},
    {"dropout": 0.3, "epochs": 70},
]

console = Console()


def start(
    recipe: dict[str, float], data: Path, out: Path, rest: list[str]
) -> subprocess.Popen[bytes]:
    """Start one training run, with its output in a file beside its folder."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in recipe.items()]
    command = [sys.executable, HERE / "train.py", data, out, *options, *rest]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def report(records: list[dict[str, Any]]) -> None:
    """Print one line for each run."""
    table = Table("dropout", "epochs", "steps", "minutes", "held-out bits per byte")
    for record in records:
        recipe = record["recipe"]
        table.add_row(
            f"{recipe['dropout']}",
            f"{record['curve'][-1]['tokens'] / record['training_tokens']:.1f}",
            f"{record['steps']}",
            f"{record['minutes']:.1f}",
            f"{best_of(record):.4f}",
        )
    console.print(table)


def main(
    data: Annotated[Path, typer.Argument(help="Folder that prepare.py wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder for the best model.")],
    minutes: Annotated[float, typer.Option(help="Time to stay within.")] = 9,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Train every recipe and keep the best model by its held-out score."""
    rest = [f"--minutes={minutes}", f"--device={device}"]
    with TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"run{index}" for index in range(len(RECIPES))]
        runs = [
            start(recipe, data, folder, rest)
            for recipe, folder in zip(RECIPES, folders, strict=True)
        ]
        codes = [run.wait() for run in runs]
        for folder in folders:
            console.print(folder.with_suffix(".log").read_text()[-1500:], markup=False)
        done = [f for f, code in zip(folders, codes, strict=True) if code == 0]
        report([json.loads((folder / RECORD).read_text()) for folder in done])
        keep_best(done, out)


if __name__ == "__main__":
    typer.run(main)
