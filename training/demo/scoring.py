"""Score held-out text: bits per byte, and how evenly the experts are used."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import NemotronHForCausalLM, PreTrainedTokenizerFast

# Longer documents are scored in pieces of this many tokens.
WINDOW = 1024


@dataclass(frozen=True)
class HeldOut:
    """The held-out pieces, longest first, and the UTF-8 bytes that they spell."""

    pieces: list[torch.Tensor]
    text_bytes: int

    @classmethod
    def of(cls, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> "HeldOut":
        """Cut a row of ids at its begin tokens."""
        starts = (ids == tokenizer.bos_token_id).nonzero().flatten().tolist()
        whole = [
            ids[start:end]
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]
        # Pieces share one token, so that each token but the first is predicted once.
        pieces = [
            document[at : at + WINDOW + 1].long()
            for document in whole
            for at in range(0, len(document) - 1, WINDOW)
        ]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return cls(sorted(pieces, key=len, reverse=True), len(text.encode()))


@torch.no_grad()
def bits_per_byte(model: NemotronHForCausalLM, held_out: HeldOut) -> float:
    """Return the bits that the model needs for each byte of the held-out text.

    Every token counts as something to predict, also the marks of speakers and ends;
    only the text itself counts as bytes.
    """
    was_training = model.training
    model.eval()
    nats = 0.0
    batch = 16 if model.device.type == "cuda" else 4
    for at in range(0, len(held_out.pieces), batch):
        nats += _nats(model, held_out.pieces[at : at + batch])
    model.train(was_training)
    return nats / torch.log(torch.tensor(2.0)).item() / held_out.text_bytes


def _nats(model: NemotronHForCausalLM, pieces: list[torch.Tensor]) -> float:
    """Return the summed loss of some pieces, padded on the right."""
    rows = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=-1)
    rows = rows.to(model.device)
    logits = model(rows[:, :-1].clamp(min=0), use_cache=False).logits
    return F.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-1, reduction="sum"
    ).item()


@dataclass
class ExpertLoad:
    """Counts how often each layer's router chose each of its experts."""

    counts: dict[str, torch.Tensor] = field(default_factory=dict)

    def watch(self, model: NemotronHForCausalLM) -> None:
        """Start counting."""
        for name, module in model.named_modules():
            if hasattr(module, "e_score_correction_bias"):
                self.counts[name] = torch.zeros(
                    module.num_experts, device=module.weight.device
                )
                module.register_forward_hook(self._hook(name))

    def reset(self) -> None:
        """Forget what was counted."""
        for count in self.counts.values():
            count.zero_()

    def shares(self) -> dict[str, list[float]]:
        """Return each expert's share of its layer's choices."""
        return {
            name: [round(share, 4) for share in (count / count.sum()).tolist()]
            for name, count in self.counts.items()
        }

    def _hook(self, name: str) -> Callable[..., None]:
        def count(
            module: torch.nn.Module, args: tuple, output: tuple[torch.Tensor, ...]
        ) -> None:
            chosen = output[2].flatten()
            self.counts[name].scatter_add_(
                0, chosen, torch.ones_like(chosen, dtype=torch.float32)
            )

        return count
