"""Draw the training curve from the run's record."""

import json
from pathlib import Path
from typing import Annotated

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def main(
    folder: Annotated[Path, typer.Argument(help="The trained model's folder.")],
) -> None:
    """Plot held-out bits per byte against tokens seen, for every run made."""
    record = json.loads((folder / "training_run.json").read_text())
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=100)
    for run in [record, *record.get("alternatives", [])]:
        seen = [point["tokens"] / 1e6 for point in run["curve"]]
        scores = [point["held_out"] for point in run["curve"]]
        chosen = run is record
        label = f"dropout {run['recipe']['dropout']}" + (" (chosen)" if chosen else "")
        axes.plot(seen, scores, label=label, linewidth=2.2 if chosen else 1.2)
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("held-out bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "training_curve.png")


if __name__ == "__main__":
    typer.run(main)
