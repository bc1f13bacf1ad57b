"""The finder of host reads: it finds each, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.host_reads import HostReadError, no_host_reads, recorded_host_reads

#: Each way to read, of some values, and the name it is known by.
READS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "item": ("item", lambda x: x[0].item()),
    "int": ("item", lambda x: int(x[0])),
    "float": ("item", lambda x: float(x[0])),
    "if": ("item", lambda x: 1 if (x > 2).any() else 0),
    "in": ("item", lambda x: 3 in x),
    "index": ("item", lambda x: "abcdefg"[x.long()[0]]),
    "slice": ("item", lambda x: x[: x.long()[1]]),
    "format": ("item", lambda x: f"{x[0]:.3f}"),
    "tolist": ("tolist", lambda x: x.tolist()),
    "repr": ("tolist", repr),
    "cpu": ("cpu", lambda x: x.cpu()),
    "numpy": ("numpy", lambda x: x.numpy()),
    "array": ("__array__", lambda x: np.asarray(x)),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "where": ("nonzero", lambda x: torch.where(x > 2)),
    "mask": ("boolean mask", lambda x: x[x > 2]),
    "write by mask": ("boolean mask", lambda x: x.index_put_((x > 2,), x[:1])),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 2)),
    "unique": ("unique", lambda x: x.unique()),
    "runs": ("unique_consecutive", lambda x: x.unique_consecutive()),
    "equal": ("equal", lambda x: torch.equal(x, x)),
    "allclose": ("allclose", lambda x: torch.allclose(x, x)),
    "bincount": ("bincount", lambda x: x.long().bincount()),
    "repeats": ("repeat_interleave", lambda x: x.repeat_interleave(x.long())),
}

#: What resembles these and reads nothing.
HARMLESS: dict[str, Callable[[Tensor], object]] = {
    "where": lambda x: torch.where(x > 2, x, 0),
    "index": lambda x: x[x.long()],
    "write": lambda x: x.index_put_((x.long(),), x + 1),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0),
    "repeats": lambda x: x.repeat_interleave(2),
    "repeats, counted": lambda x: x.repeat_interleave(x.long(), output_size=15),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "size": lambda x: x[: len(x) - 2].reshape(2, -1),
}


def values() -> Tensor:
    """Make what is read."""
    return torch.arange(6.0)


@pytest.mark.parametrize("case", READS)
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_reads_are_refused_and_named(case: str) -> None:
    """Every read is an error at the call."""
    name, read = READS[case]
    with pytest.raises(HostReadError, match=name), no_host_reads():
        read(values())


@pytest.mark.parametrize("case", HARMLESS)
def test_no_read_is_reported_where_none_is(case: str) -> None:
    """Arithmetic on the device passes."""
    with no_host_reads():
        HARMLESS[case](values())


def test_reads_are_listed_in_order() -> None:
    """A list tells what was read, once a call, and the calls work."""
    with recorded_host_reads() as reads:
        assert values().tolist() == [0, 1, 2, 3, 4, 5]
        assert values()[3].item() == 3
    assert reads == ["tolist", "item"]
    values().tolist()
    assert len(reads) == 2
