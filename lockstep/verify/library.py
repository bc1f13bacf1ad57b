"""The third engine: the model code of ``transformers``, which nobody here wrote.

It reads the same folder and computes every text whole; in torch alone, unless kernels
of ``mamba_ssm`` are installed, which it prefers. ``certificate.toml`` lists what is
known to be wrong with it, and how that is met.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.config import ModelConfig
from lockstep.errors import CheckpointError, ConfigError


class Library:
    """A checkpoint as the library runs it."""

    def __init__(
        self, folder: Path, config: ModelConfig, device: torch.device, dtype: str
    ) -> None:
        """Load a folder, and see that no parameter is made up.

        Raises:
            ConfigError: The library is missing, or has no such model.
            CheckpointError: It does not find all parameters.
        """
        try:
            from transformers import AutoModelForCausalLM, __version__
            from transformers.models.auto import modeling_auto
        except ImportError as error:
            wanted = 'pip install "transformers>=5.17,<6"'
            raise ConfigError(f"{error}; {wanted}") from error
        if config.family not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ConfigError(
                f"transformers {__version__} has no model for family "
                f"{config.family!r}; 5.17 has one for each of Lockstep's"
            )
        load: Any = AutoModelForCausalLM.from_pretrained
        named = dict.fromkeys(
            ("attn_implementation", "experts_implementation"), "eager"
        )
        model, found = load(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, **named
        )
        missing = {*found["missing_keys"]}
        if config.tie_embeddings:
            model.lm_head.weight = model.get_input_embeddings().weight
            missing -= {"lm_head.weight"}
        if missing:
            names = ", ".join(sorted(missing))
            raise CheckpointError(f"transformers does not find {names} in {folder}")
        if config.mamba:
            group_norms(model)
            for layer in mamba_layers(model):
                layer.time_step_limit = config.mamba.time_step_limit
        self.model, self.is_wide = model.eval().to(device), False

    def widen(self) -> None:
        """Go on in float64, from the same weights."""
        self.model.double()
        self.is_wide = True

    @torch.no_grad()
    def logprobs(self, token_ids: list[int]) -> Tensor:
        """Compute a text; a row of log-probabilities for each token, on the CPU."""
        ids = torch.tensor([token_ids], device=self.model.device)
        # cuDNN may convolve float32 in fewer bits.
        with Widening() if self.is_wide else torch.backends.cudnn.flags(enabled=False):
            logits = self.model(ids, use_cache=False).logits[0]
        logits = logits if self.is_wide else logits.float()
        return torch.log_softmax(logits, -1).cpu()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Append ``count`` tokens to a prompt, each the likeliest."""
        token_ids = [*prompt]
        for _ in range(count):
            token_ids.append(int(self.logprobs(token_ids)[-1].argmax()))
        return token_ids


def mamba_layers(model: torch.nn.Module) -> list[Any]:
    """Find the library's Mamba layers, in order."""
    return [each for each in model.modules() if hasattr(each, "time_step_limit")]


def group_norms(model: torch.nn.Module) -> None:
    """Give each Mamba layer a gated norm of groups, if it has none."""
    for layer in mamba_layers(model):
        if not hasattr(layer.norm, "group_size"):
            layer.norm = Grouped(layer.norm, layer.n_groups)


class Grouped(torch.nn.Module):
    """A norm over all channels made one over groups of them."""

    def __init__(self, norm: torch.nn.Module, num_groups: int) -> None:
        """Cut the weight into groups."""
        super().__init__()
        self.norm, self.groups = norm, (num_groups, -1)
        weight: Any = norm.weight
        weight.data = weight.data.view(self.groups)

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Norm each group for itself."""
        hidden, gate = (each.unflatten(-1, self.groups) for each in (hidden, gate))
        return self.norm(hidden, gate).flatten(-2)


class Widening(TorchFunctionMode):
    """Gives float64 to whoever asks for float32 by name."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function with the wider dtype."""
        func = Tensor.double if func is Tensor.float else func
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def hush() -> None:
    """Have the library keep its notices and bars to itself."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
