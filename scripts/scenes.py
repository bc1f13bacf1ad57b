"""Workloads that make happen all that an engine can meet, on models that show it.

The verifier finds the known faults of ``tests/mutants.py`` in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.blocks import align_down
from lockstep.config import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
)
from lockstep.plan import RowKind, RowPlan, StepPlan
from lockstep.request import FinishReason, Request, SamplingParams
from lockstep.verify import Arrival, Workload
from lockstep.verify.observe import Start
from lockstep.verify.workload import BLOCKS, VOCAB, draw_arrivals

_MAMBA = MambaConfig(
    num_heads=6, head_dim=3, state_size=5, num_groups=2, scan_chunk_size=16
)
_ATTENTION = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=6)
_MOE = MoeConfig(
    num_experts=6,
    top_k=2,
    expert_size=10,
    shared_size=11,
    num_groups=3,
    top_k_groups=2,
)
_WITNESS = ModelConfig(
    family="tiny",
    layer_pattern="M*-EM",
    vocab_size=VOCAB,
    hidden_size=20,
    max_positions=160,
    eos_token_ids=(0,),
    mamba=_MAMBA,
    attention=_ATTENTION,
    mlp=MlpConfig(size=21),
    moe=_MOE,
)
#: Small models: every kind of layer, and every variant of each in one or the other.
MODELS = {
    "witness": _WITNESS,
    "turned": replace(
        _WITNESS,
        layer_pattern="*M-E",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logit_divisor=0.8,
        mamba=replace(_MAMBA, time_step_limit=(0.2, 0.6)),
        attention=replace(
            _ATTENTION, qk_norm=True, rotary=RotaryConfig(theta=50.0, part=0.7)
        ),
        mlp=MlpConfig(size=21, activation="silu", gated=True, bias=True),
        moe=replace(
            _MOE,
            shared_size=0,
            num_groups=1,
            top_k_groups=1,
            scoring="softmax",
            latent_size=9,
            activation="silu",
            gated=True,
            bias=True,
        ),
    ),
    "attention": replace(_WITNESS, layer_pattern="*-*"),
}

_FEWER = {"num_blocks": 9, "snapshot_slots": 2, "max_tokens_per_step": 23}
_LEAN = {"record_logprobs": False}
_LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
#: The same prompt again while the first is decoded, and again when all are done: they
#: complete equal blocks, hold the same ones, and end a few steps apart.
_TWINS = [
    Arrival([*BLOCKS[2], *BLOCKS[3], *range(length)], _LONG, step)
    for step, length in ((0, 7), (1, 7), (2, 7), (3, 0), (40, 7), (41, 0), (42, 0))
]
#: One that is to report from just behind a state on, which it must not start from.
_REPORTED = Arrival(
    [*BLOCKS[2], *BLOCKS[3], 1, 2, 3],
    replace(_LONG, prompt_logprobs=1, prompt_logprobs_from=32),
    43,
)
#: Two that leave a third at a block whose state nobody has stored, in one step.
_SIBLINGS = [
    Arrival([*BLOCKS[2], *BLOCKS[0], *range(first, last)], _LONG, step)
    for step, first, last in ((80, 30, 48), (82, 40, 48), (82, 50, 58))
]
#: Two that decode the same, some steps apart: one keeps a state that the other wants.
_PAIR = [
    Arrival([*BLOCKS[3], *range(5)], replace(_LONG, max_tokens=45), step)
    for step in (100, 103)
]
#: What fits the pool of `_FEWER` exactly, and what does not by one token.
_LARGEST = [
    Arrival([*range(9), *BLOCKS[0] * 7], replace(_LONG, max_tokens=count), 40)
    for count in (24, 25)
]

#: Four that begin together and outgrow the pool of `_FEWER`: some are sent back.
_GROWING = [
    Arrival([*BLOCKS[index], index], replace(_LONG, max_tokens=40))
    for index in range(4)
]

#: One is forgotten and comes again. While it decodes, what it will generate comes as a
#: prompt, in slices: a block of that is given up for the one just generated.
_OVERTAKEN = [
    Arrival([1] * 5, replace(_LONG, max_tokens=30)),
    Arrival([*range(9)] * 15, replace(_LONG, max_tokens=2), 35),
    Arrival([1] * 5, replace(_LONG, max_tokens=30), 60),
    Arrival([2] * 20, replace(_LONG, max_tokens=2), 87, after=0),
]
_SLOW = {"max_tokens_per_step": 9}


class Scene(NamedTuple):
    """A workload, and the model that runs it."""

    workload: Workload
    model: str = "witness"


@dataclass(frozen=True)
class Disturbed:
    """What goes wrong before and within the steps of a workload.

    Every step also tries plans that do not fit, which both engines must refuse alike.

    Attributes:
        aborted: Steps before which a request is aborted, and whom.
        within: For some steps a component, at whose first call a request is aborted, or
            an exception thrown if it is nobody.
    """

    aborted: Mapping[int, str]
    within: Mapping[int, tuple[str, str]]

    def __call__(self, engine: Any, step: int) -> Any:
        """Do what comes before a step; return the engine's answers."""
        answers = [str(_try_plan(engine, plan)) for plan in _misfits(engine)]
        for key in {key for key, _ in self.within.values()}:
            _restore(engine.components, key)
        if step in self.within:
            key, name = self.within[step]
            _once(engine.components, key, lambda: _disturb(engine, name))
        return {"plans": answers, "abort": engine.abort(self.aborted.get(step, ""))}


#: Once and never again; then twice in a row, so that one request is at fault.
_FAILING = {
    4: ("rms_norm", ""),
    9: ("sample", ""),
    17: ("rms_norm", ""),
    18: ("rms_norm", ""),
    25: ("copy_states", ""),
}
_ABORTED = Disturbed(
    {6: "r3", 14: "r0"}, {11: ("rms_norm", "r7"), 13: ("sample", "r9")}
)
_FAULTY = replace(_ABORTED, within={**_FAILING, **_ABORTED.within})
_REFUSING = Disturbed({}, {})


def scenes() -> dict[str, Scene]:
    """Make all scenes, by name."""
    family = [
        *_TWINS,
        _REPORTED,
        *draw_arrivals(10, seed=6, stems=2, pause=1),
        *_SIBLINGS,
        *_PAIR,
    ]
    wide = {"max_tokens_per_step": 128, "snapshot_slots": 3}
    short = {"ssm_state_dtype": "bfloat16"}
    faults = [*draw_arrivals(20, seed=2), *_LARGEST]
    tight = {**_FEWER, "eviction": "ref_zero"}
    variants = draw_arrivals(16, seed=3, stems=2)
    growing = [*_GROWING, *_TWINS]
    stateless = [*_TWINS, _REPORTED, *draw_arrivals(8, seed=4, stems=1)]
    return {
        "crowd": Scene(Workload(draw_arrivals(24, seed=1), {}, _REFUSING)),
        "short states": Scene(Workload(draw_arrivals(8, seed=5, stems=2), short)),
        "family": Scene(Workload(family, wide)),
        "faults": Scene(Workload(faults, tight, _FAULTY)),
        "variants": Scene(Workload(variants, {**_FEWER, **_LEAN}, _ABORTED), "turned"),
        "growing": Scene(Workload(growing, _FEWER)),
        "overtaken": Scene(Workload(_OVERTAKEN, {"num_blocks": 9, **_SLOW})),
        "no states": Scene(Workload(stateless, _LEAN), "attention"),
    }


def _once(components: Any, key: str, act: Callable[[], None]) -> None:
    """Do something at the next call of a component, within it."""

    def disturbed(*arguments: Any) -> Any:
        _restore(components, key)
        act()
        return getattr(components, key)(*arguments)

    disturbed.__wrapped__ = getattr(components, key)  # type: ignore[attr-defined]
    # Frozen for everybody else: engines never change what they are made of.
    object.__setattr__(components, key, disturbed)


def _restore(components: Any, key: str) -> None:
    """Take back a disturbance that was never met."""
    part = getattr(components, key)
    object.__setattr__(components, key, getattr(part, "__wrapped__", part))


def _disturb(engine: Any, name: str) -> None:
    """Abort a request, or fail."""
    if not name:
        raise RuntimeError("thrown by the workload")
    # As if its text had come to a stop string, which only the caller can see.
    engine.abort(name, FinishReason.STOP)


def _misfits(engine: Any) -> Iterator[StepPlan]:
    """Make plans that may not be carried out.

    One takes in all who wait, for whom there may be no slot; others skip as much as
    blocks allow, where logits may be wanted or no state be stored.
    """
    waiting = engine.export_state().waiting
    if waiting:
        yield StepPlan([_first_row(each, 0, 1) for each in waiting])
    for each in waiting:
        length = len(each.token_ids)
        if start := align_down(length - 1, engine.sizes.block_size):
            yield StepPlan([_first_row(each, start, length)])


def _first_row(request: Request, start: int, end: int) -> RowPlan:
    """Make the row in which a request would be admitted."""
    samples, kind = end == len(request.token_ids), RowKind.PREFILL
    return RowPlan(request.request_id, kind, start, end, samples, 0, 0, [])


def _try_plan(engine: Any, plan: StepPlan) -> Any:
    """Have a plan carried out, and undo it."""
    start = Start.of(engine)
    try:
        return engine.scheduler.plan(plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        start.give(engine)
