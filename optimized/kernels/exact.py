"""Functions that round as little as torch's do, which Triton's own do not."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

#: The interpreter knows no device library; numpy's functions are exact.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exact_exp(x):
    """Return the exponential; `tl.exp` of float32 is a few units off."""
    if _IS_INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def exact_divide(numerator, denominator):
    """Return the quotient, rounded to nearest; ``/`` of float32 is not."""
    if numerator.dtype.is_fp64():
        return numerator / denominator
    else:
        return tl.div_rn(numerator, denominator)


@triton.jit
def add_product(left, right, sums):
    """Add a matrix product to sums: in wide arithmetic, the whole product at once.

    Such products are chains of additions. A new chain for each is far more exact than
    one that never ends.
    """
    product_type: tl.constexpr = sums.dtype
    if left.dtype == product_type:
        return sums + tl.dot(
            left, right, input_precision="ieee", out_dtype=product_type
        )
    else:
        return tl.dot(left, right, sums, out_dtype=product_type)
