"""Train the demo model with transformers' own NemotronHForCausalLM."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from architecture import build, rounded, save
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from safetensors.torch import load_file
from scan import replace_scan
from scoring import ExpertLoad, HeldOut, bits_per_byte
from transformers import AutoTokenizer, NemotronHForCausalLM, PreTrainedTokenizerFast

# The step from which steps are timed, the part of the time they may fill, and the
# steps after which the schedule is fitted into the time again.
TIMED_FROM = 20
SHARE_OF_TIME = 0.97
STEPS_BETWEEN_FITS = 50

console = Console()


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is trained, and how."""

    size: str
    epochs: float
    batch: int
    window: int
    dropout: float
    steps_between_scores: int
    seed: int = 0
    peak_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: int = 200
    final_rate: float = 0.02
    balance_rate: float = 1e-3


# What each kind of device trains unless told otherwise.
RECIPES = {
    "cuda": Recipe("demo", 45, 16, 1024, 0.25, steps_between_scores=250),
    "cpu": Recipe("small", 5, 8, 256, 0.1, steps_between_scores=1000),
}


def epoch_windows(ids: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield batches for ever: each epoch joins its documents in a new order."""
    starts = (ids == 1).nonzero().flatten().tolist()
    documents = [
        ids[start:end]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
    ]
    generator = torch.Generator().manual_seed(recipe.seed)
    rows = len(ids) // (recipe.window + 1) // recipe.batch * recipe.batch
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        stream = torch.cat([documents[index] for index in order]).long()
        table = stream[: rows * (recipe.window + 1)].view(rows, -1)
        shuffled = torch.randperm(rows, generator=generator)
        yield from table[shuffled].split(recipe.batch)


def add_dropout(model: NemotronHForCausalLM, rate: float) -> None:
    """Drop part of the embeddings and of every mixer's output in training."""

    def drop(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        if not module.training:
            return output
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate), *output[1:])
        return F.dropout(output, rate)

    model.model.embeddings.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.mixer.register_forward_hook(drop)


def optimizer_for(model: NemotronHForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    on_gpu = model.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=on_gpu)


def rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine."""
    if step < recipe.warmup:
        return recipe.peak_rate * (step + 1) / recipe.warmup
    done = min((step - recipe.warmup) / max(steps - recipe.warmup, 1), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return recipe.peak_rate * (recipe.final_rate + (1 - recipe.final_rate) * cosine)


@torch.no_grad()
def balance(model: NemotronHForCausalLM, load: ExpertLoad, rate: float) -> None:
    """Make the experts that were chosen too rarely a little likelier.

    The correction alone keeps the load even; there is no auxiliary loss.
    """
    for name, count in load.counts.items():
        bias = model.get_submodule(name).e_score_correction_bias
        bias += rate * torch.sign(count.mean() - count)
        bias -= bias.mean()
    load.reset()


class Run:
    """One training run and its record."""

    def __init__(
        self,
        recipe: Recipe,
        data: Path,
        out: Path,
        device: torch.device,
        minutes: float,
    ) -> None:
        """Build the model and load the tokens."""
        torch.manual_seed(recipe.seed)
        self.recipe, self.out, self.minutes = recipe, out, minutes
        sides = load_file(data / "tokens.safetensors")
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
            data / "tokenizer"
        )
        self.ids = sides["train"]
        self.held_out = HeldOut.of(sides["held_out"], self.tokenizer)
        self.model = build(recipe.size, len(self.tokenizer)).to(device)
        self.load = ExpertLoad()
        self.load.watch(self.model)
        add_dropout(self.model, recipe.dropout)
        self.optimizer = optimizer_for(self.model, recipe)
        per_step = recipe.batch * (recipe.window + 1)
        self.planned = self.steps = round(recipe.epochs * len(self.ids) / per_step)
        self.curve: list[dict[str, float]] = []
        self.best = math.inf
        self.started = time.monotonic()
        self.timed_from = 0.0

    def train(self) -> None:
        """Train to the end of the schedule, keeping the best weights on disk."""
        batches = epoch_windows(self.ids, self.recipe)
        losses: list[torch.Tensor] = []
        self.model.train()
        with _bar() as bar:
            task = bar.add_task("training", total=self.steps, loss="")
            step = 0
            while step < self.steps:
                losses.append(self._step(next(batches), step))
                step += 1
                if step == TIMED_FROM:
                    self.timed_from = self._seconds()
                if step >= self.recipe.warmup and step % STEPS_BETWEEN_FITS == 0:
                    self._fit_into_time(step)
                every = self.recipe.steps_between_scores
                out_of_time = time.monotonic() - self.started > self.minutes * 60
                if step % every == 0 or step == self.steps or out_of_time:
                    mean = torch.stack(losses).mean().item()
                    self._score(step, mean)
                    losses.clear()
                    label = f"{mean:.3f} / {self.curve[-1]['held_out']:.3f}"
                    bar.update(task, completed=step, total=self.steps, loss=label)
                if out_of_time:
                    return

    def _step(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        rate = rate_at(step, self.steps, self.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = rows.to(self.model.device, non_blocking=True)
        logits = self.model(rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        balance(self.model, self.load, self.recipe.balance_rate)
        return loss.detach()

    def _fit_into_time(self, step: int) -> None:
        """Shorten the schedule to what the time allows, so that it ends annealed.

        What a step has taken so far includes its part of scoring and saving.
        """
        now = self._seconds()
        per_step = (now - self.timed_from) / (step - TIMED_FROM)
        left = max(SHARE_OF_TIME * self.minutes * 60 - now, 0.0)
        self.steps = min(self.planned, step + int(left / per_step))

    def _seconds(self) -> float:
        """Return the seconds since the start, with all queued work done."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - self.started

    def _score(self, step: int, train_loss: float) -> None:
        """Note the losses; save the weights if they are the best so far."""
        score = bits_per_byte(self.model, self.held_out)
        self.load.reset()
        seen = step * self.recipe.batch * self.recipe.window
        self.curve.append(
            {"step": step, "tokens": seen, "train": train_loss, "held_out": score}
        )
        if score < self.best:
            self.best = score
            save(self.model, rounded(self.model), self.tokenizer, self.out)
        self._write_record()
        console.print(
            f"step {step} of {self.steps}, {self._seconds():.0f} s: "
            f"train {train_loss:.3f}, held out {score:.4f}"
        )

    def _write_record(self) -> None:
        """Write what the model card is made from."""
        device = self.model.device
        on_gpu = device.type == "cuda"
        record = {
            "recipe": asdict(self.recipe),
            "steps": self.steps,
            "minutes": self._seconds() / 60,
            "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "training_tokens": len(self.ids),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "curve": self.curve,
        }
        path = self.out / "training_run.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("train / held out: {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )


def main(
    data: Annotated[Path, typer.Argument(help="Folder that prepare.py wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder for the trained model.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    size: Annotated[str | None, typer.Option(help="demo or small.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the text.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Part to drop.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.")] = None,
    minutes: Annotated[float, typer.Option(help="Time to stay within.")] = 70,
) -> None:
    """Train a model and save its best weights, rounded to bfloat16."""
    given = {"size": size, "epochs": epochs, "dropout": dropout, "seed": seed}
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    recipe = replace(RECIPES[device], **changes)
    replace_scan()
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    run = Run(recipe, data, out, torch.device(device), minutes)
    run.train()
    console.print(f"best held-out score: {run.best:.4f} bits per byte")


if __name__ == "__main__":
    typer.run(main)
