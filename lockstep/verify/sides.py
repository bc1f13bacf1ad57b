"""What is compared: sides, and the model, sizes and weights that both are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.assemble import build_components, build_engine, settle_options
from lockstep.config import EngineConfig, ModelConfig, Sizes, engine_options
from lockstep.interfaces import Components, component_key
from lockstep.memory import plan_memory, torch_dtype
from lockstep.parameters import MoeParameters, Parameters, make_parameters
from lockstep.weights import WITNESS, Checkpoint

#: Options of every engine unless a workload says otherwise: pools small enough to be
#: fought for, full records, and free memory that shows when it is read.
SMALL: dict[str, Any] = {
    "max_requests": 4,
    "max_tokens_per_step": 37,
    "num_blocks": 14,
    "snapshot_slots": 5,
    "record_logprobs": True,
    "debug": ("integrity", "poison"),
}


class Setup(NamedTuple):
    """What both engines are built from."""

    model_config: ModelConfig
    engine_config: EngineConfig
    sizes: Sizes
    parameters: Parameters
    device: torch.device


@dataclass(frozen=True)
class Side:
    """An engine to be compared.

    Attributes:
        backend: One of both.
        components: Components that are replaced.
        options: Options of `EngineConfig` for it alone.
        mixes: Whether its components work in the other's engine.
    """

    backend: str = "reference"
    components: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mixes: bool = True

    def settle(self, setup: Setup) -> Setup:
        """Settle its options, and the sizes that follow."""
        model, config, _, parameters, device = setup
        config = replace(config, **self.options)
        config = settle_options(config, self.backend, device)
        dtype = parameters.embedding.dtype
        sizes = plan_memory(model, config, device, dtype)
        return setup._replace(engine_config=config, sizes=sizes)

    def parts(self, setup: Setup) -> dict[str, Any]:
        """List every component by key."""
        config = self.settle(setup).engine_config
        kernels, stream = config.kernels or "torch", bool(config.side_stream)
        chosen = build_components(self.backend, self.components, kernels, stream)
        return {component_key(e): getattr(chosen, e.name) for e in fields(Components)}

    def build(self, setup: Setup, components: Mapping[str, Any]) -> Any:
        """Build the engine of these components."""
        return build_engine(*self.settle(setup), self.backend, components)

    def __str__(self) -> str:
        """Name backend, components and options."""
        chosen = {**self.components, **self.options}.items()
        named = [f"{k}={getattr(v, '__name__', v)}" for k, v in chosen]
        return " ".join([self.backend, *named])


def make_setup(
    model: str | ModelConfig,
    options: Mapping[str, Any],
    device: torch.device,
    dtype_name: str = "auto",
) -> Setup:
    """Read or draw a model, and settle all sizes; a config has its own dtype."""
    from lockstep.families import read_config_files, read_model_config
    from lockstep.llm import find_dtype, find_folder

    if isinstance(model, str):
        folder = find_folder(model)
        config = read_model_config(read_config_files(folder))
        dtype = find_dtype(dtype_name, config, device)
        fill = Checkpoint(folder, config, device).fill
    else:
        config, dtype, fill = model, torch_dtype(model.dtype), WITNESS.fill
    engine_config = engine_options(EngineConfig(**SMALL), options)
    sizes = plan_memory(config, engine_config, device, dtype)
    parameters = make_parameters(config, dtype, device, fill)
    if isinstance(model, ModelConfig):
        _make_ties(parameters)
    return Setup(config, engine_config, sizes, parameters, device)


def _make_ties(parameters: Parameters) -> None:
    """Give tokens equal logits in pairs, and the last experts equal scores.

    So the lowest id has to be taken. Products with zeros are equal however they are
    added up; a token's tie that rounding decides is noted as one.
    """
    half = len(parameters.head) // 2
    parameters.head[half : 2 * half] = parameters.head[:half]
    for layer in parameters.layers:
        if isinstance(layer, MoeParameters):
            layer.router[-2:] = 0
            if layer.correction is not None:
                layer.correction[-2:] = layer.correction[-1].clone()


def in_float64(setup: Setup) -> Setup:
    """Widen everything."""
    config = replace(
        setup.engine_config, ssm_state_dtype="float64", kv_dtype="auto", debug=()
    )
    return setup._replace(engine_config=config, parameters=_widen(setup.parameters))


def _widen(value: Any) -> Any:
    """Bring all floats within to float64."""
    if isinstance(value, Tensor):
        return value.double()
    if isinstance(value, tuple):
        return tuple(map(_widen, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in fields(value)]
        return replace(value, **{n: _widen(getattr(value, n)) for n in names})
    return value
