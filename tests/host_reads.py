"""Reads of device tensors by the host, as errors or as a list."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from benchmarks.counting import watching


class HostReadError(AssertionError):
    """The host read a tensor where it must not."""


@contextmanager
def recorded_host_reads() -> Generator[list[str]]:
    """List what the host reads of tensors meanwhile, by the name of the call."""
    reads: list[str] = []
    with watching(reads.append):
        yield reads


@contextmanager
def recorded_copies() -> Generator[list[str]]:
    """List copies of the host's numbers to the device that wait, by the call."""
    copies: list[str] = []
    with watching(lambda _: None, copies.append):
        yield copies


@contextmanager
def no_host_reads() -> Generator[None]:
    """Refuse every read of a tensor by the host.

    Raises:
        HostReadError: At the call, and names it.
    """

    def refuse(name: str) -> None:
        raise HostReadError(f"the host reads a tensor: {name}")

    with watching(refuse):
        yield
