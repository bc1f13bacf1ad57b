"""Keep the better of two trained models."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

RECORD = "training_run.json"

console = Console()


def best_of(record: dict[str, Any]) -> float:
    """Return a run's lowest held-out score."""
    return min(point["held_out"] for point in record["curve"])


def keep_best(folders: list[Path], out: Path) -> None:
    """Put the best model's files into a folder, which may be one of those compared.

    Its record lists every other run, since all were compared on the held-out text.
    """
    records = [json.loads((folder / RECORD).read_text()) for folder in folders]
    winner = min(range(len(folders)), key=lambda index: best_of(records[index]))
    runs: list[dict[str, Any]] = []
    for record in records:
        runs += [record, *record.pop("alternatives", [])]
    others = [run for run in runs if run is not records[winner]]
    for run in others:
        run.pop("evaluation", None)
    if folders[winner] != out:
        shutil.copytree(folders[winner], out, dirs_exist_ok=True)
    record = records[winner] | {"alternatives": others}
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"kept the run that scored {best_of(record):.4f} bits per byte")


def main(
    candidate: Annotated[Path, typer.Argument(help="Folder of a newly trained model.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the model kept so far.")],
) -> None:
    """Replace a model's files by another's if that one's held-out score is lower."""
    keep_best([folder, candidate], folder)


if __name__ == "__main__":
    typer.run(main)
