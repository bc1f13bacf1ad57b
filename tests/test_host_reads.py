"""The finder of host reads finds each, and nothing else; waits by name are known."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines import greedy, make_engine
from tests.host_reads import (
    HostReadError,
    no_host_reads,
    recorded_copies,
    recorded_host_reads,
)
from tests.scenarios.common import text, tiny

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

#: Each way to bring numbers of the host to a device, which has no memory here.
COPIES: dict[str, tuple[list[str], Callable[[Tensor], object]]] = {
    "tensor": (["tensor"], lambda x: torch.tensor([1, 2])),
    "from_numpy": (["tensor"], lambda x: torch.from_numpy(np.ones(2))),
    "index by a list": (["tensor"], lambda x: x[[0, 1]]),
    "to": (["to_copy"], lambda x: x.to("meta")),
    "not pinned": (["to_copy"], lambda x: x.to("meta", non_blocking=True)),
    "copy_": (["copy"], lambda x: torch.empty_like(x, device="meta").copy_(x)),
    "full": ([], lambda x: torch.full((2,), 3)),
    "one number": ([], lambda x: x.__setitem__(0, 1.0)),
    "stack": ([], lambda x: torch.stack([x[0], x[1]])),
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


@pytest.mark.parametrize("case", COPIES)
def test_copies_that_wait_are_listed(case: str) -> None:
    """By the call, and what makes none is not."""
    expected, copy = COPIES[case]
    x = values()
    with recorded_copies() as copies:
        copy(x)
    assert copies == expected


@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_a_step_copies_its_arrays_alone(graphs: str) -> None:
    """Reports need no more; arrays of padded steps have their place already."""
    options: dict[str, Any] = {"debug": (), "record_logprobs": False}
    options |= {"graphs": graphs, "max_tokens_per_step": 24}
    engine = make_engine(tiny("M*E"), "optimized", **options)
    engine.add(text(40), greedy(3, logprobs=2, prompt_logprobs=1))
    engine.add(text(9, seed=1), greedy(3, top_p=0.9, temperature=0.7, logprobs=1))
    modes: set[str] = set()
    while engine.has_work:
        with recorded_copies() as copies:
            record = engine.step()
        assert copies == ["tensor"] * (record.mode == "eager"), record
        modes.add(record.mode)
    assert modes >= {"eager" if graphs == "off" else graphs}


def _waits(tree: ast.AST, within: str = "") -> Iterator[str]:
    """Name the functions in which the host waits for the device by name."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", None)
        inner = f"{within}.{name}".lstrip(".") if isinstance(name, str) else within
        if isinstance(node, ast.Attribute) and node.attr in ("synchronize", "query"):
            yield inner
        yield from _waits(node, inner)


def test_every_wait_by_name_is_known() -> None:
    """Torch reports reads and copies that wait, but neither of these calls.

    In steps the host waits only for a buffer's copy but one, before it writes there.
    """
    root = Path(__file__).resolve().parents[1]
    found = [
        f"{path.relative_to(root)}: {function}"
        for folder in ("lockstep", "optimized")
        for path in sorted((root / folder).rglob("*.py"))
        for function in _waits(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [
        "optimized/buffers.py: StepBuffer.send",
        "optimized/graphs.py: GraphRunner.capture",
        "optimized/graphs.py: GraphRunner._check_room",
    ]
