"""Listens to the components of an engine, and finds real entries among padded ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.batch import BatchMetadata
from lockstep.memory import Caches
from lockstep.parameters import Parameters

#: Names of results, where they are not just outputs; a matrix product is named by its
#: weight. Log-probabilities are compared where the step's record has them: engines
#: differ in how they ask.
RESULTS = {
    "norm.add_rms_norm": ("residual", "hidden"),
    "attention.append_rotary_kv": ("queries",),
    "moe.route": ("expert_ids", "expert_weights"),
    "sampler.sample": ("token_ids",),
    "sampler.log_probabilities": (),
}
#: Arguments that are written, by component or module: name and place of each.
WRITES = {
    "conv1d": {"conv_states": 3},
    "scan": {"ssm_states": 3},
    "attention.append_kv": {"key_blocks": 2, "value_blocks": 3},
    "attention.append_rotary_kv": {"key_blocks": 3, "value_blocks": 4},
    "snapshots": {"caches": 0},
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
    pools: dict[str, Any]
    arguments: tuple[Any, ...]


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
    """Listens to every component of an engine.

    Attributes:
        tape: What was heard since it was last replaced.
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

    def wrap(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Wrap functions; classes stay as they are.

        What is wrapped is of no side: a loop of the reference may stand in for a part
        of an engine whose steps are padded, since nothing is captured here.
        """
        return {
            key: partial(self._call, key, part) if key.split(".")[1].islower() else part
            for key, part in parts.items()
        }

    def follow(self, model: Any) -> None:
        """Listen to the batches that a model is given."""
        forward = model.forward

        def listen(batch: BatchMetadata, caches: Caches) -> Tensor:
            self.tape.batch, self.layer = batch, 0
            try:
                return forward(batch, caches)
            finally:
                self.layer = None

        model.forward = listen

    def _call(self, key: str, function: Any, *given: Any, **named: Any) -> Any:
        """Call a component, and note what came of it."""
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
        written = WRITES.get(key) or WRITES.get(key.partition(".")[0], {})
        pools = {name: _copy(given[at]) for name, at in written.items()}
        names = () if results is None else RESULTS.get(key, ("outputs",))
        if key == "linear.linear":
            names = (self.names.get(given[1].data_ptr(), "outputs"),)
        found = results if isinstance(results, tuple) else (results,)
        found = dict(zip(names, map(_copy, found), strict=False))
        self.tape.calls[Place(key, self.layer, turn)] = Call(found, pools, kept)
        if key == "norm.add_rms_norm" and self.layer is not None:
            self.layer += 1
        return results


def _copy(value: Any) -> Any:
    """Copy a tensor, or all within."""
    if isinstance(value, Tensor):
        return value.clone()
    parts = value.tensors() if hasattr(value, "tensors") else value
    is_whole = parts is value and not hasattr(value, "_fields")
    return value if is_whole else type(value)(*map(_copy, parts))


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
        """Take the real rows of a call's result, or of its first argument."""
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

    def owners(self, place: Place, tokens: list[Any]) -> dict[int, Any]:
        """Say to which of a step's tokens the rows belong that `take` takes."""
        if place.key.endswith("_decode"):
            tokens = tokens[: self.decodes]
        elif place.key.endswith("_prefill"):
            tokens = tokens[self.decodes :]
        elif _is_head(place) or place.key == "sampler.sample":
            rows = self.logits()
            if not _is_head(place):
                rows = rows[self.batch.sample_index[: self.batch.num_samples]]
            tokens = [tokens[index] for index in rows.tolist()]
        return dict(enumerate(tokens))

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
        chunks = batch.last_scan_chunks[:prefills].tolist()
        num_chunks = chunks[-1] + 1 if chunks else 0
        counts = {"decode": self.decodes, "snapshot": batch.num_snapshots}
        counts |= dict.fromkeys(("prefill", "initial", "last"), prefills)
        counts |= {"cu_prefill": prefills + 1, "cu_scan": num_chunks + 1}
        counts |= {"scan": num_chunks, "sample": batch.num_samples}
        found: dict[str, Any] = {"shape": str(batch.shape)}
        for entry in fields(batch):
            name, value = entry.name, getattr(batch, entry.name)
            known = [n for n in counts if name.startswith(f"{n}_")]
            if isinstance(value, int):
                found[name] = value
            elif isinstance(value, Tensor) and known:
                found[name] = value[: counts[max(known, key=len)]].tolist()
            elif isinstance(value, Tensor) and name != "logit_index":
                by_row = name in ("context_lens", "block_tables")
                count = prefills if by_row else self.prefill_tokens
                found[name] = self.both(value, count).tolist()
        found["logit_index"] = self.logits().tolist()
        for name, values in batch.draws._asdict().items():
            found[f"draws.{name}"] = values[: batch.num_samples].tolist()
        nowhere = dummy_block * block_size
        found["kv_index"] = [min(index, nowhere) for index in found["kv_index"]]
        for name, filler in (("block_tables", dummy_block), ("draws.banned_ids", -1)):
            found[name] = [[i for i in row if i != filler] for row in found[name]]
        return found


def _is_head(place: Place) -> bool:
    """Say whether a call makes logits."""
    return place.key == "linear.linear" and place.layer is None
