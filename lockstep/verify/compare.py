"""Compares what two engines made of one step: integers exactly, floats in classes.

Floats of a token, a place or a slot may differ by a relative root-mean-square error of
``budget * u``, with ``u`` the unit roundoff of the narrowest dtype on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .observe import ENGINE, Observer, Outcome, Owner, Rows, Seen, Spot
from .recorder import CHOICES
from .report import Difference, Verdict
from .sides import Setup

#: Unit roundoff of each dtype.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-9,
}
#: Largest error after one step, about four times the largest that the workloads of
#: ``scripts/scenes.py`` measure between both backends (in brackets). Norms of values
#: that nearly cancel out are the worst. Over a run hardly more adds up (1.1 times as
#: much), since states forget errors about as fast as they come.
BUDGETS = {
    "results": 2000.0,  # 504
    "K/V": 500.0,  # 121
    "conv states": 240.0,  # 59
    "ssm states": 120.0,  # 30
    "log-probabilities": 200.0,  # 48
}
#: How much less it is where something is kept in fewer bits than float32 has: most
#: differences are rounded away (measured with bfloat16: 32, 6, 3, 6 and 4).
SHORT_FACTOR = 1 / 8
#: Largest difference of log-probabilities from those of transformers, as a multiple of
#: that between transformers and itself in float64: about twice the largest measured on
#: six checkpoints of every family (in brackets; 2.4 in bfloat16).
LIBRARY_FACTOR = 6.0  # 2.6
#: Largest bound that tells anything, in nats: in float16 bounds are below, in bfloat16
#: mostly above, where a step may read a wrong token and pass.
COARSEST = 0.5
Parts = Mapping[str, Any]


class Judge:
    """Finds differences of one step."""

    def __init__(
        self, setup: Setup, parts: tuple[Parts, Parts], verdict: Verdict, bitwise: bool
    ) -> None:
        """Know how exact is exact here.

        Args:
            setup: What both engines were built from.
            parts: Components of oracle and subject.
            verdict: Takes errors and ties.
            bitwise: Whether floats are compared bit by bit.
        """
        self.setup, self.parts, self.verdict = setup, parts, verdict
        self.bitwise = bitwise
        config, own = setup.engine_config, setup.parameters.embedding.dtype
        named = [n for n in (config.kv_dtype, config.ssm_state_dtype) if n != "auto"]
        dtypes = own, *(getattr(torch, name) for name in named)
        self.unit = max(UNIT_ROUNDOFF[dtype] for dtype in dtypes)
        factor = SHORT_FACTOR if self.unit > 2.0**-24 else 1.0
        scale = 0.0 if bitwise else factor * self.unit
        self.bounds = {kind: budget * scale for kind, budget in BUDGETS.items()}
        #: Requests whose numbers may differ for the rest of the step, since which
        #: expert a token visits was a tie.
        self.excused: set[str] = set()

    def differences(self, expected: Outcome, actual: Outcome) -> Iterator[Difference]:
        """Find differences, in the order in which a step makes them."""
        assert expected.record is not None
        look = Observer(self.setup, expected.record.plan)
        yield from self._compare(look.before(actual), look.before(expected))
        if self.bitwise and expected.record.mode == "padded":
            padding = look.padding(actual.tape), look.padding(expected.tape)
            yield from self._compare(*padding)
        yield from self._compare(look.calls(actual.tape), look.calls(expected.tape))
        if actual.tape.failure is not None and expected.tape.failure is None:
            place, why = actual.tape.failure
            yield Difference(place.key, "exception", why, place.layer)
        if actual.record is None:
            yield Difference(ENGINE, "exception", actual.error)
            return
        yield from self._compare(look.after(actual), look.after(expected))

    def _compare(self, actual: Seen, expected: Seen) -> Iterator[Difference]:
        """Compare what both have; what one lacks follows from another difference."""
        known = dict(actual)
        for spot, theirs in expected:
            if spot not in known or spot.request in self.excused:
                continue
            mine = known[spot]
            if isinstance(theirs, Rows) and isinstance(mine, Rows):
                yield from self._rows(spot, mine, theirs)
            elif not self._agree(mine, theirs):
                yield _unequal(spot, mine, theirs, Owner(spot.request))

    def _rows(self, spot: Spot, actual: Rows, expected: Rows) -> Iterator[Difference]:
        """Compare tensors row by row."""
        mine, theirs, kind = actual.values, expected.values, expected.kind
        if mine.shape != theirs.shape:
            yield _unequal(spot, mine.shape, theirs.shape, Owner(spot.request))
            return
        errors = row_errors(mine, theirs)
        for index in errors.nonzero()[:, 0].tolist():
            owner = expected.owners.get(index, Owner())
            error = float(errors[index])
            if owner.request in self.excused:
                continue
            if not theirs.is_floating_point():
                pair = mine[index].tolist(), theirs[index].tolist()
                found = _unequal(spot, *pair, owner)
                if not self._is_tie(spot, actual, expected, index, found):
                    yield found
                continue
            largest = self.verdict.errors.get(kind, 0.0)
            self.verdict.errors[kind] = max(largest, error / self.unit)
            if error > self.bounds[kind]:
                text = f"relative error {error:.1e}, at most {self.bounds[kind]:.1e}"
                yield _differs(spot, f"{text}, in row {index}", owner)

    def _is_tie(
        self, spot: Spot, actual: Rows, expected: Rows, index: int, found: Difference
    ) -> bool:
        """Tell whether rounding alone decided on a choice; if so, note it.

        It did if the subject's component chooses as the oracle's did when given the
        same, and a token only if the oracle's two are closer than their class allows.
        What follows from a token's experts differs for the rest of the step.
        """
        if spot.operation not in CHOICES or not any(self.bounds.values()):
            return False
        choose = self.parts[1][spot.operation]
        (given, *rest), own = expected.arguments, actual.arguments[0]
        for inputs, made in ((given, expected), (own, actual)):
            again = choose(inputs, *rest)
            again = again[0] if isinstance(again, tuple) else again
            if not torch.equal(again, made.values):
                return False
        if spot.operation == "moe.route":
            self.excused.add(found.request)
        elif not self._is_close(actual, expected, index):
            return False
        self.verdict.ties.append(f"{found}: {found.details}")
        return True

    def _is_close(self, actual: Rows, expected: Rows, index: int) -> bool:
        """Tell whether the margin between both sides' tokens is under the bound.

        Each may be off by the bound: if both are, the oracle draws the other token.
        """
        logits, *rest = expected.arguments
        mine, theirs = int(actual.values[index]), int(expected.values[index])
        scale = max(1.0, float(torch.log_softmax(logits[index], 0)[mine].abs()))
        nudged = logits.clone()
        nudged[index, mine] += self.bounds["log-probabilities"] * scale
        nudged[index, theirs] -= self.bounds["log-probabilities"] * scale
        return int(self.parts[0]["sampler.sample"](nudged, *rest)[index]) == mine

    def _agree(self, actual: Any, expected: Any) -> bool:
        """Compare values, however nested; floats among them are log-probabilities.

        Where the likeliest tokens are reported by id, the first is the one that stands
        there, and one that a side lacks may be as likely as one that it has.
        """
        if isinstance(actual, float) and isinstance(expected, float):
            scale = max(1.0, abs(expected)) * self.bounds["log-probabilities"]
            return actual == expected or abs(actual - expected) <= scale
        if isinstance(actual, list) and isinstance(expected, list):
            return len(actual) == len(expected) and all(
                map(self._agree, actual, expected)
            )
        if isinstance(actual, dict) and any(
            isinstance(x, float) for x in actual.values()
        ):
            pairs = (actual, expected), (expected, actual)
            return next(iter(actual)) == next(iter(expected), None) and all(
                any(
                    self._agree(value, theirs.get(token, each))
                    for each in theirs.values()
                )
                for mine, theirs in pairs
                for token, value in mine.items()
            )
        return actual == expected


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return each row's root-mean-square error, relative to its values.

    A row smaller than the others is measured by them: what cancels out in it does so no
    more exactly than they are known. Equal bits are equal, NaN too.
    """
    size = len(expected), math.prod(expected.shape[1:])
    mine, theirs = (side.double().reshape(size) for side in (actual, expected))
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    error = torch.where(same, 0.0, mine - theirs).square().mean(1).sqrt()
    squares = theirs.nan_to_num(0.0, 0.0, 0.0).square().mean(1)
    scale = torch.maximum(squares, squares.mean()).sqrt().clamp(min=1e-300)
    return (error / scale).nan_to_num(nan=math.inf)


def _unequal(spot: Spot, actual: Any, expected: Any, owner: Owner) -> Difference:
    """Report two values."""
    texts = (" ".join(str(value).split())[:100] for value in (actual, expected))
    return _differs(spot, " instead of ".join(texts), owner)


def _differs(spot: Spot, details: str, owner: Owner) -> Difference:
    """Report a difference."""
    return Difference(spot.operation, spot.tensor, details, spot.layer, *owner)
