"""What is compared and what it is given: sides, workloads, models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.assemble import build_components, build_engine, settle_options
from lockstep.config import EngineConfig, ModelConfig, Sizes, engine_options
from lockstep.interfaces import Components, component_key
from lockstep.memory import plan_memory, torch_dtype
from lockstep.parameters import Parameters, make_parameters
from lockstep.request import SamplingParams
from lockstep.weights import Checkpoint, RandomWeights

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
#: Weights under which a wrong state is seen: slow decays, and outputs of order one.
WITNESS = RandomWeights(
    matrix_deviation=None,
    decay=(0.01, 2.0),
    decay_in_log=True,
    time_step=(0.1, 1.0),
    skip=(0.0, 0.1),
    norm_deviation=0.1,
    offset_deviation=0.1,
)
GREEDY = SamplingParams(temperature=0.0, seed=0)


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
        return {
            component_key(entry): getattr(chosen, entry.name)
            for entry in fields(Components)
        }

    def build(self, setup: Setup, components: Mapping[str, Any]) -> Any:
        """Build the engine of these components."""
        return build_engine(*self.settle(setup), self.backend, components)

    def __str__(self) -> str:
        """Name backend, components and options."""
        chosen = {**self.components, **self.options}.items()
        named = [f"{k}={getattr(v, '__name__', v)}" for k, v in chosen]
        return " ".join([self.backend, *named])


@dataclass(frozen=True)
class Arrival:
    """A request of a workload.

    Attributes:
        prompt: Token ids, taken modulo the vocabulary.
        sampling: How tokens are drawn.
        step: First step in which it may arrive.
        after: Number of an earlier arrival that must have ended; its prompt and its
            tokens then come before this prompt, as in the next turn of a chat.
    """

    prompt: Sequence[int]
    sampling: SamplingParams = GREEDY
    step: int = 0
    after: int | None = None


@dataclass(frozen=True)
class Disturbance:
    """Something that goes wrong.

    Attributes:
        step: When.
        abort: Number of the arrival that is aborted; None throws an exception.
        at: Key of the component at whose first call it happens; empty for an abort
            between steps.
    """

    step: int
    abort: int | None = None
    at: str = ""


@dataclass(frozen=True)
class Workload:
    """What both engines are given.

    Attributes:
        arrivals: Requests, named ``r0``, ``r1`` and so on.
        disturbances: Aborts and exceptions.
        options: Options of `EngineConfig`, in place of those of `SMALL`.
        name: For reports.
        model: What runs it unless another model is asked for.
    """

    arrivals: Sequence[Arrival]
    disturbances: Sequence[Disturbance] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = "workload"
    model: str = "witness"

    @classmethod
    def of(
        cls,
        prompts: Iterable[Sequence[int]],
        sampling: SamplingParams = GREEDY,
        **options: Any,
    ) -> Workload:
        """Let some prompts arrive at once."""
        return cls([Arrival(prompt, sampling) for prompt in prompts], (), options)


def make_setup(
    model: str | ModelConfig,
    models: Mapping[str, ModelConfig],
    options: Mapping[str, Any],
    device: torch.device,
) -> Setup:
    """Read or draw a model, and settle all sizes."""
    from lockstep.families import read_config_files, read_model_config
    from lockstep.llm import find_dtype, find_folder

    source, own = WITNESS, models.get(model) if isinstance(model, str) else model
    if own is None:
        folder = find_folder(str(model))
        own = read_model_config(read_config_files(folder))
        source = Checkpoint(folder, own, device)
        dtype = find_dtype("auto", own, device)
    else:
        dtype = torch_dtype(own.dtype)
    engine_config = engine_options(EngineConfig(**SMALL), options)
    sizes = plan_memory(own, engine_config, device, dtype)
    parameters = make_parameters(own, dtype, device, source.fill)
    if isinstance(source, RandomWeights):
        _pair_tokens(parameters)
    return Setup(own, engine_config, sizes, parameters, device)


def _pair_tokens(parameters: Parameters) -> None:
    """Give tokens equal logits in pairs, so that the lowest id has to be taken."""
    half = len(parameters.head) // 2
    parameters.head[half : 2 * half] = parameters.head[:half]


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
        named = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return replace(value, **{name: _widen(each) for name, each in named.items()})
    return value
