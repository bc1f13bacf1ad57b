"""Listens to the components of an engine, and finds real entries among padded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.memory import Caches
from lockstep.parameters import Parameters

#: Names of results; a matrix product is named by its weight. Log-probabilities are
#: compared where the step's record has them: engines differ in how they ask.
RESULTS = {
    "norm.rms_norm": ("hidden",),
    "norm.add_rms_norm": ("residual", "hidden"),
    "norm.gated_group_rms_norm": ("normed",),
    "conv1d.conv_decode": ("convolved",),
    "conv1d.conv_prefill": ("convolved",),
    "scan.scan_decode": ("y",),
    "scan.scan_prefill": ("y",),
    "attention.apply_rotary": ("queries", "keys"),
    "attention.attend_decode": ("attended",),
    "attention.attend_prefill": ("attended",),
    "mlp.activate": ("inner",),
    "mlp.activate_gated": ("inner",),
    "moe.route": ("expert_ids", "expert_weights"),
    "moe.apply_experts": ("routed",),
    "sampler.sample": ("token_ids",),
}
#: Arguments that are written: their name and place.
WRITES = {
    "conv1d.conv_decode": {"conv_states": 3},
    "conv1d.conv_prefill": {"conv_states": 3},
    "scan.scan_decode": {"ssm_states": 3},
    "scan.scan_prefill": {"ssm_states": 3},
    "attention.append_kv": {"key_blocks": 2, "value_blocks": 3},
}
#: Components that choose integers, so that rounding may decide.
CHOICES = ("moe.route", "sampler.sample")


class Place(NamedTuple):
    """Which call: component, layer, and how many such calls came before it there."""

    key: str
    layer: int | None
    turn: int


@dataclass
class Call:
    """One call of a component.

    Attributes:
        results: What it returned, by name.
        pools: What it wrote, by name.
        arguments: What it was given, where a choice may have to be made again.
    """

    results: dict[str, Tensor]
    pools: dict[str, Tensor]
    arguments: tuple[Any, ...] = ()


@dataclass
class Tape:
    """What was heard of a step.

    Attributes:
        batch: Its batch, if one was made.
        calls: Calls that returned, in order.
        failure: The call that did not, and why.
    """

    batch: BatchMetadata | None = None
    calls: dict[Place, Call] = field(default_factory=dict[Place, Call])
    failure: tuple[Place, str] | None = None


class Recorder:
    """Listens to every component of an engine, step by step.

    Attributes:
        tape: What was heard since it was last replaced.
        disturbances: What is to happen at the next call of which components.
    """

    def __init__(self, parameters: Parameters) -> None:
        """Know every matrix by where it lies: its field in its layer, or ``head``."""
        self.names = {parameters.head.data_ptr(): "head"}
        for layer in parameters.layers:
            for entry in fields(layer):
                weight = getattr(getattr(layer, entry.name), "weight", None)
                if weight is not None:
                    self.names[weight.data_ptr()] = entry.name
        self.tape = Tape()
        self.layer: int | None = None
        self.disturbances: list[tuple[str, Callable[[], None]]] = []

    def wrap(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Wrap functions, and what makes models; other classes stay as they are.

        What is wrapped is of no side: a loop of the reference may stand in for a part
        of an engine whose steps are padded, since nothing is captured here.
        """
        wrapped = dict(parts)
        for key, part in parts.items():
            if key == "model.Model":
                wrapped[key] = partial(self._make_model, part)
            elif key.partition(".")[2].islower():
                wrapped[key] = partial(self._call, key, part)
        return wrapped

    def _make_model(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Make a model whose batches are seen."""
        model = make(*arguments)
        forward = model.forward

        def listen(batch: BatchMetadata, caches: Caches) -> Tensor:
            self.tape.batch, self.layer = batch, 0
            try:
                return forward(batch, caches)
            finally:
                self.layer = None

        model.forward = listen
        return model

    def _call(self, key: str, function: Any, *given: Any, **named: Any) -> Any:
        """Call a component, and note what came of it."""
        for disturbance in [each for each in self.disturbances if each[0] == key]:
            self.disturbances.remove(disturbance)
            disturbance[1]()
        kept = tuple(map(_copy, given)) if key in CHOICES else ()
        turn = sum(place[:2] == (key, self.layer) for place in self.tape.calls)
        try:
            results = function(*given, **named)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.tape.failure = Place(key, self.layer, turn), why
            raise
        if key == "snapshots.copy_states":
            # What follows is the head, of no layer.
            self.layer = None
            pools = {"conv": given[0].conv, "ssm": given[0].ssm}
        else:
            pools = {name: given[at] for name, at in WRITES.get(key, {}).items()}
        names = RESULTS.get(key, ())
        if key == "linear.linear":
            names = (self.names.get(given[1].data_ptr(), "outputs"),)
        found = results if isinstance(results, tuple) else (results,)
        call = Call(_clones(zip(names, found, strict=False)), _clones(pools), kept)
        self.tape.calls[Place(key, self.layer, turn)] = call
        if key == "norm.add_rms_norm" and self.layer is not None:
            self.layer += 1
        return results


def _clones(named: Any) -> dict[str, Tensor]:
    """Copy tensors with their names."""
    return {name: tensor.clone() for name, tensor in dict(named).items()}


def _copy(value: Any) -> Any:
    """Copy a tensor, or a tuple of them."""
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(*map(_copy, value)) if hasattr(value, "_fields") else value


class Layout:
    """Finds the real entries of a batch."""

    def __init__(self, batch: BatchMetadata) -> None:
        """Count real and padded entries."""
        self.batch = batch
        self.decodes = batch.shape.decode_requests
        self.prefills = batch.shape.prefill_requests
        self.prefill_tokens = batch.shape.tokens - self.decodes
        self.gap = batch.padded_shape.decode_requests - self.decodes

    def take(self, place: Place, result: Tensor) -> Tensor:
        """Take the real rows of a call's result."""
        if place.key.endswith("_decode"):
            return result[: self.decodes]
        if place.key.endswith("_prefill"):
            return result[: self.prefill_tokens]
        if place.key == "sampler.sample":
            return result[: self.batch.num_samples]
        if _is_head(place):
            return result[: self.batch.num_logits]
        # Heads that are normed one by one belong to their token.
        by_token = result.unflatten(0, (len(self.batch.token_ids), -1)).squeeze(1)
        return self.both(by_token, self.prefill_tokens)

    def owners(self, place: Place, tokens: list[Any]) -> list[Any]:
        """Say to which of a step's tokens the rows belong that `take` takes."""
        if place.key.endswith("_decode"):
            return tokens[: self.decodes]
        if place.key.endswith("_prefill"):
            return tokens[self.decodes :]
        rows = self.logits()
        if place.key == "sampler.sample":
            rows = rows[self.batch.sample_index[: self.batch.num_samples]]
        elif not _is_head(place):
            return tokens
        return [tokens[index] for index in rows.tolist()]

    def both(self, values: Tensor, prefills: int) -> Tensor:
        """Take what belongs to decode rows and what belongs to prefill rows."""
        first = self.decodes + self.gap
        return torch.cat((values[: self.decodes], values[first : first + prefills]))

    def logits(self) -> Tensor:
        """Return the tokens whose logits are wanted, as if nothing were padded."""
        index = self.batch.logit_index[: self.batch.num_logits]
        return index - self.gap * (index >= self.decodes + self.gap)

    def arrays(self, dummy_block: int, block_size: int) -> dict[str, Any]:
        """List the real entries of every array, and count them.

        Args:
            dummy_block: Stands for every place in it, and ends no table.
            block_size: Tokens in a block.
        """
        batch, prefills = self.batch, self.prefills
        chunks = int(batch.last_scan_chunks[prefills - 1]) + 1 if prefills else 0
        counts = {
            "decode": self.decodes,
            "prefill": prefills,
            "initial": prefills,
            "last": prefills,
            "cu_prefill": prefills + 1,
            "snapshot": batch.num_snapshots,
            "scan": chunks,
            "cu_scan": chunks + 1,
            "sample": batch.num_samples,
        }
        found: dict[str, Any] = {"shape": str(batch.shape)}
        for entry in fields(batch):
            value = getattr(batch, entry.name)
            if entry.name.startswith("num_"):
                found[entry.name] = value
            elif entry.name == "logit_index":
                found[entry.name] = self.logits().tolist()
            elif entry.name in ("context_lens", "block_tables"):
                found[entry.name] = self.both(value, prefills).tolist()
            elif isinstance(value, Tensor):
                known = [n for n in counts if entry.name.startswith(f"{n}_")]
                rows = value[: counts[max(known, key=len)]] if known else None
                if rows is None:
                    rows = self.both(value, self.prefill_tokens)
                found[entry.name] = rows.tolist()
        for name, values in batch.draws._asdict().items():
            found[f"draws.{name}"] = values[: batch.num_samples].tolist()
        nowhere = dummy_block * block_size
        found["kv_index"] = [min(index, nowhere) for index in found["kv_index"]]
        for name, filler in (("block_tables", dummy_block), ("draws.banned_ids", -1)):
            found[name] = [_strip(row, filler) for row in found[name]]
        return found


def _is_head(place: Place) -> bool:
    """Say whether a call makes logits."""
    return place.key == "linear.linear" and place.layer is None


def _strip(values: list[int], padding: int) -> list[int]:
    """Drop padding from the end."""
    while values and values[-1] == padding:
        values = values[:-1]
    return values
