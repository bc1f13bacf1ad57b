"""What kernels compute in, and where."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

#: Bytes of shared memory that a program on sm_90 can count on, besides a few barriers.
SHARED_MEMORY = 226 * 1024

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def wide_dtype(*tensors: Tensor) -> tl.dtype:
    """Return the dtype of the arithmetic on some tensors: float32, or float64."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return TRITON_DTYPES[dtype]
