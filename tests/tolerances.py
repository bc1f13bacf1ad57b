"""How exact is exact: three classes, and every number that a test compares with.

equal
    Integers, copies, tables, replays; and on the reference side everything that must
    not depend on company, cuts or cache: bit for bit.
same-order
    Bit for bit where both computed in the same shapes and order.
budgeted
    A different order of additions: the relative root-mean-square error against
    float64 is at most ``c * u``, with ``u`` the unit roundoff of the operands and one
    ``c`` for each operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.verify.compare import UNIT_ROUNDOFF as UNIT_ROUNDOFF

#: For each operation the factor ``c``, about twice the largest error that the tests
#: measure (in brackets): those of the reference on a CPU unless said otherwise. What an
#: H200 measures is in ``benchmarks/results/gpu_tests/largest_errors.json``.
BUDGETS = {
    "activate": 3.0,  # 1.4
    "attention": 6.0,  # 2.6
    # On a GPU, over thousands of positions, whose values cancel each other.
    "long_attention": 46.0,  # 23.8
    "conv": 3.0,  # 1.4
    "experts": 6.0,  # 2.9
    # For single tokens, whose sums may nearly cancel out.
    "few_experts": 40.0,  # 12.4, of 6,000 draws
    # On a GPU, thousands of inputs wide.
    "large_experts": 60.0,  # 29.1
    "gated_group_rms_norm": 3.0,  # 1.3
    "linear": 5.0,  # 2.3
    "log_probabilities": 2.0,  # 0.64
    # A whole model of up to eight layers.
    "model": 30.0,  # 14.4
    "rms_norm": 3.0,  # 1.4
    # Angles of up to 64 radians.
    "rotary": 45.0,  # 23.3
    "route": 3.0,  # 1.3
    "scan": 4.0,  # 1.6
    "scan_state": 3.0,  # 1.3
    # Resumed, with time steps held down: one head of three then takes 40 tokens to
    # forget, has the largest state by far, and the roundings of all those steps.
    "slow_scan": 6.0,  # 2.7
    "slow_scan_state": 6.0,  # 3.0
    # The optimized side: chunks of up to 256 tokens, slices of up to 517, decays so
    # slow that nothing is forgotten. A float32 loop over tokens errs by 8.1 there.
    "chunk_scan": 8.0,  # 3.8
    "chunk_scan_state": 9.0,  # 4.1
    # Kernels at real sizes.
    "kernel_scan": 10.0,  # 4.9, in 256 lanes of float32
    "kernel_scan_state": 8.0,  # 3.7
    # Those of `mamba_ssm` in float32. In chunks of 256 tokens they take differences of
    # sums that grow all the way, and the logarithm of a softplus, of which one is most,
    # in no more digits than one has.
    "package_scan": 120.0,  # 58
    "package_scan_state": 450.0,  # 225
    "package_step": 8.0,  # 3.9
    # Its exponentials and quotients are approximate.
    "package_conv": 3.0,  # 1.1
    "package_step_state": 10.0,  # 4.7
    # Both sides of the comparison are float32, one of them chunked.
    "scan_chunked": 7.0,  # 3.4
}

#: Float64 results meet an oracle that is no more exact than they are.
FLOAT64_FACTOR = 4.0

#: Probability below which a statistical test fails; its draws are fixed.
SIGNIFICANCE = 1e-3


#: Largest difference between a log-probability and that of `transformers`, both in
#: float32 (measured: 1.6e-5; each is up to as far from float64).
TRANSFORMERS_LOGPROBS = 3e-5

#: Largest difference between log-probabilities of the two sides, in roundoffs of the
#: narrowest dtype on the way (measured: 952 on an H200, where a run whose numbers were
#: not kept had 1,304; 712 in a tenth of the matrix on a CPU; in three Mamba layers on
#: end the reference is 560 from float64, the optimized side 136).
ENGINE_LOGPROBS = 2600.0

#: The same, in roundoffs of the model's own dtype, where that is not float32: most
#: differences of sums are rounded away, and one that is not moves a whole digit.
SHORT_LOGPROBS = {torch.bfloat16: 33.0}  # 16.4, with 10,000 tokens to choose from
#: The same for kernels of `mamba_ssm` in bfloat16, which round what they multiply
#: (measured: 90).
PACKAGE_LOGPROBS = 200.0
#: Largest relative error of what two engines keep of one token, or of one state, over a
#: whole run; in roundoffs of the model's dtype (measured: 162, 89 and 46 in float32;
#: 3.84, 0 and 0.0001 in bfloat16, where a state is kept in float32 all the same).
ENGINE_STATES = {
    torch.float32: {"K/V": 330.0, "conv window": 180.0, "SSM state": 90.0},
    torch.bfloat16: {"K/V": 8.0, "conv window": 1.0, "SSM state": 1.0},
}
#: Both where kernels round what they multiply to bfloat16 as well: a rounding in one
#: layer moves all layers behind it (measured in all rows on an H200: 333; 18.4, 12.0
#: and 15.1). A state whose heads are exchanged is several hundred off.
KERNEL_LOGPROBS = 670.0
KERNEL_STATES = {"K/V": 37.0, "conv window": 24.0, "SSM state": 31.0}
#: The root mean square of those differences of log-probabilities over a whole run, of
#: positions of prefill and of decode each for themselves: a position where rounding is
#: amplified sways it little, and a fault in all does not hide behind such a one
#: (measured in as many: 14.7; the least fault that a test plants: 24.9).
KERNEL_SPREAD = 22.0
#: Share of tokens that may be ties in float32, besides one in any test.
MOST_TIES = 0.01

#: Share by which a profiler's count of kernels may differ from that of their launches.
LOST_KERNELS = 0.05
#: Share of a model's parameters that no floor counts: those of norms and the like.
SMALL_PARAMETERS = 2e-3

#: A test model is a witness if a wrong state moves its log-probabilities by this many
#: times the widest tolerance on them.
WITNESS_FACTOR = 100

#: What all tests together may have Triton's interpreter run on a CPU.
MOST_INTERPRETED = {"interpreted programs": 20_000, "interpreted engine steps": 60}


#: The largest error of each class that was let pass in this process, in roundoffs, and
#: the test that it is of.
MEASURED: dict[str, tuple[float, str]] = {}


def _note(name: str, error: float) -> None:
    """Remember an error that was let pass; what tests spoil on purpose is not."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    MEASURED[name] = max(MEASURED.get(name, (0.0, "")), (error, test))


def write_measured(folder: str) -> None:
    """Add what this process has seen to a folder, from which `read_measured` reads."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(MEASURED))


def read_measured(folder: Path) -> dict[str, tuple[float, str]]:
    """Return the largest error of each class that any process has seen, and where."""
    worst: dict[str, tuple[float, str]] = {}
    for path in folder.glob("*.json"):
        for name, (error, test) in json.loads(path.read_text()).items():
            worst[name] = max(worst.get(name, (0.0, "")), (error, test))
    return {
        name: (float(f"{error:.4g}"), test)
        for name, (error, test) in sorted(worst.items())
    }


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Hold two tensors equal bit for bit; NaN equals NaN."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} values differ"


#: Bit for bit where both sides computed in the same shapes and order.
assert_same_order = assert_equal


def assert_budgeted(operation: str, actual: Tensor, exact: Tensor) -> None:
    """Hold a result to its operation's budget against float64.

    The roundoff is that of the result's dtype, which is that of the operands.
    """
    error = relative_rms(actual, exact) / UNIT_ROUNDOFF[actual.dtype]
    budget = BUDGETS[operation]
    if actual.dtype == torch.float64:
        budget *= FLOAT64_FACTOR
    assert error <= budget, (
        f"{operation}: {error:.3g} roundoffs of {actual.dtype}, budget {budget:.3g}"
    )
    _note(f"{operation} {actual.dtype}", error)


def assert_consistent(
    side: str,
    operation: str,
    actual: Tensor,
    expected: Tensor,
    *carried: torch.dtype,
) -> None:
    """Hold two computations of one thing together: cut or whole, alone or in company.

    The reference promises them bit for bit; the optimized side may add in another
    order and round elsewhere, and is held to the operation's budget.

    Args:
        side: Whose computations they are.
        operation: Names the budget.
        actual: One result.
        expected: The other.
        carried: Dtypes that numbers were rounded to on the way; the result is no more
            exact than these.
    """
    if side == "reference":
        assert_equal(actual, expected)
        return
    dtypes = (actual.dtype, *carried)
    narrowest = max(dtypes, key=lambda dtype: UNIT_ROUNDOFF[dtype])
    assert_budgeted(operation, actual.to(narrowest), expected)


def assert_logprobs(
    side: str,
    actual: Tensor,
    expected: Tensor,
    *carried: torch.dtype,
    is_rounded: bool = False,
) -> None:
    """Hold log-probabilities of an engine to those of the reference, by value.

    Args:
        side: Whose the actual ones are; the reference promises them bit for bit.
        actual: Log-probabilities.
        expected: The reference's.
        carried: Dtypes that numbers were rounded to on the way; float32 if none.
        is_rounded: Whether kernels rounded what they multiply, too.
    """
    if side == "reference":
        assert_equal(actual, expected)
        return
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    # Tokens that cannot be are -inf on both sides.
    error = float((actual - expected).masked_fill(actual == expected, 0).abs().max())
    bound = logprobs_bound(*carried, is_rounded=is_rounded)
    assert error <= bound, (
        f"log-probabilities differ by {error:.3g}; {bound:.3g} is allowed"
    )
    dtype = _narrowest(*carried)
    _note(_name("log-probabilities", dtype, is_rounded), error / UNIT_ROUNDOFF[dtype])


def assert_spread(
    dtype: torch.dtype, kind: str, actual: Tensor, expected: Tensor
) -> None:
    """Hold all log-probabilities of a run together to the reference's.

    Args:
        dtype: The model's; kernels rounded what they multiply to it.
        kind: Of the rows that they are of.
        actual: Log-probabilities.
        expected: The reference's.
    """
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    differences = (actual - expected).masked_fill(actual == expected, 0).double()
    error = float(differences.square().mean().sqrt()) / UNIT_ROUNDOFF[dtype]
    assert error <= KERNEL_SPREAD, (
        f"log-probabilities of {kind}: the root mean square of differences is "
        f"{error:.3g} roundoffs of {dtype}, at most {KERNEL_SPREAD:.3g}"
    )
    name = _name("log-probabilities", dtype, is_rounded=True)
    _note(f"{name}, root mean square of {kind}", error)


def assert_package_logprobs(actual: Tensor, expected: Tensor) -> None:
    """Hold log-probabilities of kernels of `mamba_ssm` in bfloat16 to the reference's.

    Args:
        actual: Log-probabilities.
        expected: The reference's.
    """
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    error = float((actual - expected).masked_fill(actual == expected, 0).abs().max())
    bound = PACKAGE_LOGPROBS * UNIT_ROUNDOFF[torch.bfloat16]
    assert error <= bound, f"log-probabilities differ by {error:.3g}, not {bound:.3g}"
    _note("log-probabilities of packages", error / UNIT_ROUNDOFF[torch.bfloat16])


def logprobs_bound(*carried: torch.dtype, is_rounded: bool = False) -> float:
    """Say how far log-probabilities of both sides' engines may differ.

    Args:
        carried: Dtypes that numbers were rounded to on the way; float32 if none.
        is_rounded: Whether kernels rounded what they multiply, too.
    """
    narrowest = _narrowest(*carried)
    factor = SHORT_LOGPROBS.get(narrowest, ENGINE_LOGPROBS)
    if is_rounded:
        factor = KERNEL_LOGPROBS
    return factor * UNIT_ROUNDOFF[narrowest]


def _name(name: str, dtype: torch.dtype, is_rounded: bool) -> str:
    """Name a class of whole engines."""
    return f"{name} {dtype}{' where kernels round' if is_rounded else ''}"


def _narrowest(*carried: torch.dtype) -> torch.dtype:
    """Find the dtype with the fewest digits, of those and float32."""
    return max((torch.float32, *carried), key=lambda dtype: UNIT_ROUNDOFF[dtype])


def assert_engine_states(
    dtype: torch.dtype,
    name: str,
    actual: Tensor,
    expected: Tensor,
    is_rounded: bool = False,
) -> None:
    """Hold what an engine keeps to the reference's, each token or state by itself.

    Args:
        dtype: The model's, to which all that is kept was rounded on the way.
        name: ``K/V``, ``conv window`` or ``SSM state``.
        actual: States, by layer and by token or slot.
        expected: The reference's.
        is_rounded: Whether kernels rounded what they multiply, too.
    """
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    if not actual.numel():
        return
    difference, size = (
        values.double().flatten(2).square().mean(2).sqrt()
        for values in (actual - expected, expected)
    )
    roundoff = UNIT_ROUNDOFF[dtype]
    error = float((difference / size.clamp(min=1e-300)).max()) / roundoff
    most = (KERNEL_STATES if is_rounded else ENGINE_STATES[dtype])[name]
    assert error <= most, (
        f"{name}: {error:.3g} roundoffs of {dtype}, at most {most:.3g}"
    )
    _note(_name(name, dtype, is_rounded), error)


def assert_reports(
    side: str,
    actual: Sequence[dict[int, float] | None] | None,
    expected: Sequence[dict[int, float] | None] | None,
) -> None:
    """Hold reported log-probabilities to the reference's: same tokens, same order."""
    assert actual is not None and expected is not None
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert list(mine) == list(theirs)
            actual_values, expected_values = (
                torch.tensor(list(each.values())) for each in (mine, theirs)
            )
            assert_logprobs(side, actual_values, expected_values)


def relative_rms(actual: Tensor, exact: Tensor) -> float:
    """Return the root-mean-square error relative to the exact values' own."""
    assert actual.shape == exact.shape, f"{actual.shape} is not {exact.shape}"
    if not actual.numel():
        return 0.0
    exact = exact.double()
    error = (actual.double() - exact).square().mean().sqrt()
    return float(error / exact.square().mean().sqrt().clamp(min=1e-300))
