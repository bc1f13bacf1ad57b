"""Compiles kernels for a GPU that is not there, just as their launchers launch them.

``python -m tests.kernels.compiling MODULE`` calls the functions named in the ``cases``
of a module on tensors without memory, notes every launch, compiles each for sm_90, and
prints what the compiler says of it, as JSON. It needs a process of its own: where
Triton's interpreter is on, nothing can be compiled.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
#: Bytes of shared memory that a program can have on sm_90.
SHARED_MEMORY = 227 * 1024

_POINTERS = {
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


#: Additions in whatever order programs come, so that no sum is twice the same.
_ATOMICS = re.compile(r"\b(?:atom|red)\.\S*\.(?:b?f16|f32|f64)\S*")


class Launch(NamedTuple):
    """One launch: a kernel, its arguments by name, and the compiler's options.

    Attributes:
        grid: How many programs there are, along each axis.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """The kernel's name, behind that of its module."""
        function = self.kernel.fn
        return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


class Compiled(NamedTuple):
    """What the compiler made of a launch.

    Attributes:
        case: Which case launched it.
        kernel: Its name, behind that of its module.
        shared: Bytes of shared memory.
        registers: Registers of a thread.
        spilled: Bytes of registers that spilled, by thread.
        products: Instructions of the matrix units.
        atomics: Instructions that change floats in memory in any order.
    """

    case: str
    kernel: str
    shared: int
    registers: int
    spilled: int
    products: int
    atomics: list[str]


def compile_apart(module: str) -> list[Compiled]:
    """Compile the cases of a module in another process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [Compiled(*entry) for entry in json.loads(run.stdout.splitlines()[-1])]


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """List what a call launches, compiled or interpreted, and launch nothing."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(
        kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        names = kernel.arg_names
        given = {name: options.pop(name) for name in names if name in options}
        by_name = dict(zip(names, args, strict=False)) | given
        launches.append(Launch(kernel, by_name, options, grid))

    with pytest.MonkeyPatch.context() as patch:
        for owner in (JITFunction, InterpretedFunction):
            patch.setattr(owner, "run", record)
        call()
    return launches


def compile_launch(case: str, launch: Launch) -> Compiled:
    """Compile a launch with what Triton would know of its arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = kind = _kind(parameter, value)
        if kind == "constexpr":
            constants[parameter.name] = value
        elif not parameter.do_not_specialize and _is_aligned(value):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=launch.options,
    )
    registers, spilled = _resources(compiled)
    return Compiled(
        case,
        launch.name,
        compiled.metadata.shared,
        registers,
        spilled,
        len(re.findall(r"\b(?:mma|wgmma\.mma_async)\.sync", compiled.asm["ptx"])),
        _ATOMICS.findall(compiled.asm["ptx"]),
    )


def _kind(parameter: Any, value: Any) -> str:
    """Name the type of an argument."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
    if parameter.is_constexpr or value is None or is_one:
        return "constexpr"
    assert type(value) is int, f"{parameter.name} is {value!r}"
    return "i32" if abs(value) < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    """Tell whether a number or an address is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return value % 16 == 0


def _resources(compiled: Any) -> tuple[int, int]:
    """Read registers and spilled bytes off the binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"{os.getpid()}.cubin"
    path.write_bytes(compiled.asm["cubin"])
    try:
        report = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True
        ).stdout
    finally:
        path.unlink()
    registers, local = (
        re.search(r"REG:(\d+)", report),
        re.search(r"LOCAL:(\d+)", report),
    )
    stack = re.search(r"STACK:(\d+)", report)
    assert registers and local and stack, report
    return int(registers[1]), int(local[1]) + int(stack[1])


def main(module: str) -> None:
    """Compile all cases of a module; equal launches once."""
    found: list[Compiled] = []
    seen: set[str] = set()
    for name, call in importlib.import_module(module).cases().items():
        for launch in recorded(call):
            brief = [(k, _brief(v)) for k, v in launch.arguments.items()]
            if (key := repr((launch.name, brief, launch.options))) not in seen:
                seen.add(key)
                found.append(compile_launch(name, launch))
    print(json.dumps(found))


def _brief(value: Any) -> Any:
    """Say what matters of an argument to a compiler."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
