"""Builds an engine from the components of either side; alone in knowing both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from lockstep.config import EngineConfig, ModelConfig, Sizes
from lockstep.errors import ConfigError
from lockstep.interfaces import Components, component_keys
from lockstep.memory import torch_dtype
from lockstep.parameters import Parameters

BACKENDS = ("reference", "optimized")
#: Options of `EngineConfig` that only the optimized side understands.
OPTIMIZED_ONLY = ("graphs", "kernels", "side_stream")
#: Components of the optimized side that each kernel set replaces, and by what.
KERNELS: dict[str, dict[str, str]] = {
    "torch": {},
    "triton": {
        "norm.rms_norm": "kernels.norm:rms_norm",
        "norm.add_rms_norm": "kernels.norm:add_rms_norm",
        "norm.gated_group_rms_norm": "kernels.norm:gated_group_rms_norm",
        "conv1d.conv_decode": "kernels.conv1d:conv_decode",
        "conv1d.conv_prefill": "kernels.conv1d:conv_prefill",
        "scan.scan_decode": "kernels.scan:scan_decode",
        "scan.scan_prefill": "kernels.scan:scan_prefill",
        "attention.append_kv": "kernels.attention:append_kv",
        "attention.append_rotary_kv": "kernels.attention:append_rotary_kv",
        "attention.attend_decode": "kernels.attention:attend_decode",
        "attention.attend_prefill": "kernels.attention:attend_prefill",
        "mlp.activate": "kernels.mlp:activate",
        "mlp.activate_gated": "kernels.mlp:activate_gated",
        "moe.route": "kernels.moe:route",
        "moe.apply_experts": "kernels.moe:apply_experts",
        "snapshots.copy_states": "kernels.snapshots:copy_states",
        "sampler.sample": "kernels.sampler:sample",
        "sampler.log_probabilities": "kernels.sampler:log_probabilities",
    },
}
KERNELS["mamba-ssm"] = KERNELS["triton"] | {
    "conv1d.conv_decode": "packages:conv_decode",
    "conv1d.conv_prefill": "packages:conv_prefill",
    "scan.scan_decode": "packages:scan_decode",
    "scan.scan_prefill": "packages:scan_prefill",
}
#: Calls kernels of other packages.
PACKAGES = "lockstep.optimized.packages"
#: Programs along the second axis of a launch, on which rows and scan chunks lie.
MOST_PLACES = 65_535
#: Where a choice of `EngineConfig` puts another model.
SIDE_STREAM = {"model.Model": "streams:Model"}
#: Components that decide and count; all others compute, and graphs must hold them.
BOOKKEEPING = ("scheduler", "prefix_cache", "kv_blocks", "state_slots")


def settle_options(
    engine_config: EngineConfig, backend: str, device: torch.device
) -> EngineConfig:
    """Give the options that a backend alone has their values on a device.

    Returns:
        The same configuration; on the optimized side with ``graphs``, ``kernels`` and
        ``side_stream`` set.

    Raises:
        ConfigError: An unknown backend, an option that it does not have, or one that
            cannot work on this device.
    """
    _check_backend(backend)
    if backend == "reference":
        for name in OPTIMIZED_ONLY:
            if (value := getattr(engine_config, name)) is not None:
                raise ConfigError(
                    f"{name}={value!r} is an option of the optimized backend; leave "
                    'it unset with backend="reference"'
                )
        return engine_config
    is_gpu = device.type == "cuda"
    kernels = _settle_kernels(engine_config.kernels or "auto", is_gpu)
    most = "decode" if kernels == "mamba-ssm" else "all"
    graphs = engine_config.graphs or (most if is_gpu else "off")
    if graphs in ("decode", "all") and not is_gpu:
        raise ConfigError(
            f'graphs={graphs!r} captures CUDA graphs, which needs a GPU; "padded" runs '
            f"the same padded steps eagerly on {device.type}"
        )
    if engine_config.side_stream and not is_gpu:
        raise ConfigError(f"side_stream needs a GPU; the device is {device.type}")
    return replace(
        engine_config,
        graphs=graphs,
        kernels=kernels,
        side_stream=bool(engine_config.side_stream),
    )


def build_components(
    backend: str,
    replacements: Mapping[str, Any] | None = None,
    kernels: str = "torch",
    side_stream: bool = False,
) -> Components:
    """Collect the components of a backend, with some replaced.

    Args:
        backend: ``reference`` or ``optimized``.
        replacements: For each replaced ``module.symbol`` another side's name, the
            place of a function or class as ``package.module:symbol``, or the function
            or class itself.
        kernels: Kernel set of the optimized backend.
        side_stream: Whether the optimized backend uses a side stream.

    Raises:
        ConfigError: An unknown backend or component, or one that is none.
    """
    known = component_keys()
    own = {**KERNELS[kernels], **(SIDE_STREAM if side_stream else {})}
    own = {key: f"lockstep.{backend}.{place}" for key, place in own.items()}
    choices = {**dict.fromkeys(known, backend), **own, **(replacements or {})}
    unknown = sorted(set(choices) - set(known))
    if unknown:
        raise ConfigError(f"unknown components {unknown}; known are {', '.join(known)}")
    chosen = {key: _resolve(key, choice) for key, choice in choices.items()}
    for key, value in chosen.items():
        if not callable(value):
            raise ConfigError(f"{key}={value!r} is neither a function nor a class")
    return Components(**{key.split(".")[1]: value for key, value in chosen.items()})


def build_engine(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    sizes: Sizes,
    parameters: Parameters,
    device: torch.device,
    backend: str = "reference",
    components: Mapping[str, Any] | None = None,
) -> Any:
    """Build an engine of one backend.

    ``engine_config`` must be the one from which ``sizes`` were planned;
    `settle_options` comes before both.

    Raises:
        ConfigError: An unknown backend or component, an option that the backend does
            not have, or parts that do not go together.
    """
    engine_config = settle_options(engine_config, backend, device)
    engine = _import(backend, "engine").Engine
    parts = build_components(
        backend,
        components,
        engine_config.kernels or "torch",
        bool(engine_config.side_stream),
    )
    if sizes.graph_shapes:
        _check_padding(parts, str(engine_config.graphs))
    if engine_config.kernels not in (None, "torch"):
        _check_grid(model_config, sizes)
    if model_config.num_mamba_layers and _keys_within(PACKAGES, parts):
        dtype, kv_dtype = parameters.embedding.dtype, engine_config.kv_dtype
        windows = dtype if kv_dtype == "auto" else torch_dtype(kv_dtype)
        states = torch_dtype(engine_config.ssm_state_dtype)
        check = import_module(PACKAGES).check
        check(model_config.mamba, sizes, dtype, windows, states)
    return engine(model_config, engine_config, sizes, parameters, parts, device)


def _settle_kernels(kernels: str, is_gpu: bool) -> str:
    """Choose a kernel set."""
    if kernels == "auto":
        return "triton" if is_gpu else "torch"
    interprets = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton")
    if kernels != "torch" and not is_gpu and not interprets:
        # Kernels of other packages ask for more than an interpreter.
        slowly = (
            ", or install Triton and set TRITON_INTERPRET=1 to interpret them, very "
            "slowly"
        )
        raise ConfigError(
            f'kernels={kernels!r} needs a GPU; use kernels="torch" on a CPU'
            + slowly * (kernels == "triton")
        )
    return kernels


def _check_padding(parts: Components, graphs: str) -> None:
    """Refuse what cannot run where steps are padded: a loop must know its length."""
    loops = [
        key
        for key in _keys_within("lockstep.reference", parts)
        if key.split(".")[0] not in BOOKKEEPING
    ]
    if loops:
        raise ConfigError(
            f"graphs={graphs!r} cannot hold {', '.join(loops)} of the reference: a "
            "loop reads its length from the device, and knows no padding; use "
            'graphs="off"'
        )
    rows = [key for key in _keys_within(PACKAGES, parts) if "prefill" in key]
    if rows and graphs != "decode":
        raise ConfigError(
            f"graphs={graphs!r} cannot hold {', '.join(rows)} of other packages: they "
            "take one row at a time, and the host reads where it ends; use "
            'graphs="decode" or "off"'
        )


def _check_grid(model_config: ModelConfig, sizes: Sizes) -> None:
    """Refuse steps of more rows or scan chunks than a launch has places for."""
    # A prompt stores three states at most, besides its last.
    rows, chunk = 4 * sizes.max_requests, sizes.scan_chunk_size
    # And it may begin and end within chunks.
    chunks = 2 * sizes.max_requests + sizes.max_tokens_per_step // chunk
    if max(rows, chunks * bool(model_config.num_mamba_layers)) > MOST_PLACES:
        raise ConfigError(
            f"a step may have {rows} rows and states, and {chunks} scan chunks of "
            f"{chunk} tokens; kernels take {MOST_PLACES} of either: lower "
            'max_requests or max_tokens_per_step, or use kernels="torch"'
        )


def _keys_within(place: str, parts: Components) -> list[str]:
    """List the components that are defined in a module or package."""
    homes = {
        key: str(getattr(getattr(parts, key.split(".")[1]), "__module__", ""))
        for key in component_keys()
    }
    return [key for key, home in homes.items() if f"{home}.".startswith(f"{place}.")]


def _resolve(key: str, choice: Any) -> Any:
    """Find what is chosen for a component."""
    if not isinstance(choice, str):
        return choice
    module, symbol = key.split(".")
    if choice in BACKENDS:
        return getattr(_import(choice, module), symbol)
    path, _, symbol = choice.partition(":")
    try:
        return getattr(import_module(path), symbol)
    # A module of a user's may raise anything, or be a script that ends.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}={choice!r}: {type(error).__name__}: {error}; it must be "
            "reference, optimized or package.module:symbol, of a module that Python "
            "finds and can import"
        ) from error


def _import(backend: str, name: str) -> ModuleType:
    """Import a module of a backend."""
    _check_backend(backend)
    return import_module(f"lockstep.{backend}.{name}")


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; known are {', '.join(BACKENDS)}")
