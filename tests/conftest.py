"""Settings of every test: one thread, checked shapes, poisoned memory, profiles."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Generator
from itertools import chain
from pathlib import Path
from typing import Any

# Before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

torch.set_num_threads(1)

# `LOCKSTEP_TEST_DEVICE=cuda python -m pytest tests/spec` runs the same tests there.
if DEVICE := os.environ.get("LOCKSTEP_TEST_DEVICE", ""):
    torch.set_default_device(DEVICE)
    # Oracles convolve in float32, not in fewer bits.
    torch.backends.cudnn.allow_tf32 = False

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("reference", "optimized")

# Read when triton is imported: without a GPU, its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Every call of a side has its shapes and dtypes checked; without beartype, none has.
# Kernels are no Python that could be checked.
CHECKED = [
    f"lockstep.{s}.{path.stem}" for s in SIDES for path in (ROOT / s).glob("*.py")
]
if importlib.util.find_spec("beartype"):
    install_import_hook(CHECKED, "beartype.beartype")

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    settings.register_profile(
        "ci",
        max_examples=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(
        "fuzz",
        max_examples=2000,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``side`` to tests of mirrored modules: each side that has the module.

    The module is named by the test file (``test_scan.py``) or by its ``MODULE``. A file
    that says ``PADDED`` runs once more on the optimized side at padded shapes.
    """
    if "side" in metafunc.fixturenames:
        stem = metafunc.definition.path.stem.removeprefix("test_")
        name = getattr(metafunc.module, "MODULE", stem)
        sides = [side for side in SIDES if (ROOT / side / f"{name}.py").exists()]
        sides += ["padded"] if getattr(metafunc.module, "PADDED", False) else []
        metafunc.parametrize("side", sides)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that nobody wrote with NaN, so that reading it shows."""

    def poison(make: object) -> object:
        def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)  # type: ignore[operator]
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


def pytest_configure() -> None:
    """Count what is interpreted."""
    if IS_INTERPRETING:
        # Not before modules can be hooked.
        from tests.kernels import interpreting

        interpreting.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Let each report carry what was interpreted."""
    report = yield
    if IS_INTERPRETING:
        from tests.kernels import interpreting

        interpreting.note(report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the largest errors that were let pass in a folder, where one is named.

    Tests that have too much interpreted have failed.
    """
    if folder := os.environ.get("LOCKSTEP_MEASURED", ""):
        from tests.tolerances import write_measured

        write_measured(folder)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _say_what_was_interpreted(reporter)[1]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _say_what_was_interpreted(reporter: Any) -> tuple[list[str], list[str]]:
    """Say what all processes have had interpreted, and what of it is too much."""
    from tests.kernels import interpreting

    totals = interpreting.add_up(chain.from_iterable(reporter.stats.values()))
    counts = [f"{count:,} {name}" for name, count in totals.items() if count]
    return counts, list(interpreting.excesses(totals))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tokens two engines might have drawn differently, if any test did.

    And what was interpreted, if anything.
    """
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                totals.update(dict(report.user_properties))
    for dtype in ("float32", "bfloat16"):
        if tokens := totals[f"tokens of {dtype}"]:
            terminalreporter.write_line(
                f"{dtype}: {totals[f'ties of {dtype}']} of {tokens} tokens were ties"
            )
    counts, excesses = _say_what_was_interpreted(terminalreporter)
    for line in counts:
        terminalreporter.write_line(line)
    for line in excesses:
        terminalreporter.write_line(line, red=True)
