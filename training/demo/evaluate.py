"""Score a trained model's folder on the held-out text, and sample from it."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file
from scan import replace_scan
from scoring import ExpertLoad, HeldOut, bits_per_byte
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    NemotronHForCausalLM,
    PreTrainedTokenizerFast,
)

PROMPTS = ["The next morning", "It was", '"My dear Miss Woodhouse,']
# Who answers, who speaks, and the words spoken.
SCENES = [
    ("Hamlet", "Horatio", "What is the matter, my lord?"),
    ("Juliet", "Romeo", "Do you love me?"),
    ("Falstaff", "Prince", "How now, Jack! Where hast thou been?"),
    ("Macbeth", "Lady Macbeth", "What do you mean?"),
]

console = Console()


def score(
    model: NemotronHForCausalLM, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """Return the scores that the model card shows."""
    load = ExpertLoad()
    load.watch(model)
    held_out = HeldOut.of(ids, tokenizer)
    return {
        "bits_per_byte": bits_per_byte(model, held_out),
        "tokens": len(ids),
        "bytes": held_out.text_bytes,
        "expert_shares": load.shares(),
    }


def prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return the prompts as ids: openings of prose, then openings of scenes."""
    openings = [tokenizer(text).input_ids for text in PROMPTS]
    for character, speaker, words in SCENES:
        messages = [
            {"role": "system", "content": f"You are {character}."},
            {"role": "user", "name": speaker, "content": words},
        ]
        openings.append(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        )
    return openings


def sample(
    model: NemotronHForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tokens: int,
    **options: Any,
) -> list[str]:
    """Continue every prompt with the folder's own sampling settings."""
    torch.manual_seed(0)
    found = []
    for ids in prompts(tokenizer):
        row = torch.tensor([ids], device=model.device)
        mask = torch.ones_like(row)
        made = model.generate(
            row, attention_mask=mask, max_new_tokens=tokens, **options
        )
        found.append(tokenizer.decode(made[0]))
    return found


def main(
    folder: Annotated[Path, typer.Argument(help="The trained model's folder.")],
    data: Annotated[Path, typer.Argument(help="Folder that prepare.py wrote.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    tokens: Annotated[int, typer.Option(help="Length of each sample.")] = 80,
) -> None:
    """Write scores and samples into the folder's training_run.json."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device).eval()
    sampled = sample(model, tokenizer, tokens)
    greedy = sample(model, tokenizer, tokens, do_sample=False)
    replace_scan()
    ids = load_file(data / "tokens.safetensors")["held_out"]
    evaluation = score(model, ids, tokenizer)
    console.print(f"held out: {evaluation['bits_per_byte']:.4f} bits per byte")
    for text in sampled + greedy:
        console.print(f"\n{text}", markup=False, highlight=False)
    path = folder / "training_run.json"
    record = json.loads(path.read_text())
    record["evaluation"] = evaluation | {"samples": sampled, "greedy": greedy}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
