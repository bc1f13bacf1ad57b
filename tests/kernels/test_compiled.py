"""Every kernel and every configuration compiles for sm_90, and fits."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import SHARED_MEMORY, compile_apart

#: Kernels that multiply matrices.
PRODUCTS = (
    "_pass_states_kernel",
    "_outputs_kernel",
    "_attend_split_kernel",
    "_attend_tile_kernel",
    "_product_kernel",
)


@pytest.mark.parametrize("cases", ["mamba_cases", "attention_moe_cases"])
def test_all_compile_and_fit(cases: str) -> None:
    """Shared memory suffices, and no register spills.

    Products of two-byte operands run on the matrix units.
    """
    found = compile_apart(f"tests.kernels.{cases}")
    assert found
    for entry in found:
        assert entry.shared <= SHARED_MEMORY, entry
        # A far angle is brought near by way of the stack; float64 is for proofs.
        if "rotary" not in entry.case and "float64" not in entry.case:
            assert entry.spilled == 0, entry
        if entry.kernel in PRODUCTS and "bfloat16" in entry.case:
            assert entry.products > 0, entry
