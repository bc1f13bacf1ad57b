"""Write the model card and the notice from the run's record."""

import json
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
from texts import HELD_OUT_EVERY
from transformers import AutoConfig

HERE = Path(__file__).parent
TEMPLATES = {"README.md": "card.md.jinja", "NOTICE": "notice.jinja"}


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


def render(folder: Path) -> dict[str, str]:
    """Return the text of each file that is made from a template."""
    facts = values(folder)
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    return {
        name: templates.get_template(template).render(facts)
        for name, template in TEMPLATES.items()
    }


def main(
    folder: Annotated[Path, typer.Argument(help="The trained model's folder.")],
) -> None:
    """Render README.md and NOTICE into the folder."""
    for name, text in render(folder).items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    typer.run(main)
