"""Write the model card, the notice and the training curve from the run's record."""

import json
from pathlib import Path
from typing import Annotated, Any

import jinja2
import matplotlib
import typer
from texts import HELD_OUT_EVERY
from transformers import AutoConfig

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

HERE = Path(__file__).parent


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot held-out bits per byte against tokens seen, for every run made."""
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
    figure.savefig(path)


def values(folder: Path) -> dict[str, Any]:
    """Return everything that the templates name."""
    record = json.loads((folder / "training_run.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    best = min(record["curve"], key=lambda point: point["held_out"])
    return {
        "run": record,
        "recipe": record["recipe"],
        "evaluation": record["evaluation"],
        "config": config,
        "held_out_every": HELD_OUT_EVERY,
        "shares": {
            name.split(".")[2]: [f"{share:.3f}" for share in row]
            for name, row in record["evaluation"]["expert_shares"].items()
        },
        "pattern": config.hybrid_override_pattern,
        "best": best,
        "epochs": best["tokens"] / record["training_tokens"],
        "megabytes": (folder / "model.safetensors").stat().st_size / 1e6,
    }


def main(
    folder: Annotated[Path, typer.Argument(help="The trained model's folder.")],
) -> None:
    """Render README.md, NOTICE and training_curve.png into the folder."""
    facts = values(folder)
    draw(facts["run"], folder / "training_curve.png")
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    for name, template in {
        "README.md": "card.md.jinja",
        "NOTICE": "notice.jinja",
    }.items():
        (folder / name).write_text(templates.get_template(template).render(facts))


if __name__ == "__main__":
    typer.run(main)
