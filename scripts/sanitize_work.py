"""Work for a memory checker: each kernel alone, small engines, and two planted faults.

    python scripts/sanitize_work.py WORK [--device cuda] [--launches FILE]

``scripts/sanitize.py`` runs this under compute-sanitizer. What is launched is noted
here, since such a tool names only what is wrong. Grids are small, because a checker
takes thousands of times as long; shapes are odd, or those of a real model, where tiles
and loops depend on them.
"""

# The source of a kernel is Triton's language, which only looks like Python.
# pyright: reportMissingTypeStubs=false, reportArgumentType=false

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.batch import BatchMetadata, ScanTokens
from lockstep.config import Activation, DTypeName, MambaConfig, ModelConfig, MoeConfig
from lockstep.memory import torch_dtype
from lockstep.request import SamplingParams
from scripts.sanitize import DTYPES, entry_kernels

#: One kernel of this many threads is raced, another writes as far again as it may.
THREADS = 128


@dataclass
class Launches:
    """How often a kernel was launched, and how long that took under the checker."""

    count: int = 0
    seconds: float = 0.0


class Noted:
    """A kernel that notes its launches, and waits for each."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        """Wrap a kernel."""
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return what launches it, as Triton does."""
        run = self._kernel[grid]

        def launch(*args: Any, **options: Any) -> None:
            begin = time.perf_counter()
            run(*args, **options)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._launches.count += 1
            self._launches.seconds += time.perf_counter() - begin

        return launch


def note_launches() -> dict[str, Launches]:
    """Have every kernel of the package note its launches; returns the notes."""
    notes: dict[str, Launches] = {}
    for module, names in entry_kernels().items():
        home = importlib.import_module(f"lockstep.optimized.kernels.{module}")
        for name in names:
            notes[key := f"{module}.{name}"] = Launches()
            setattr(home, name, Noted(getattr(home, name), notes[key]))
    return notes


# Each kernel alone. A function has the name of its module, and calls all of it.


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Draw numbers on the host, so that the device runs kernels of ours alone."""
    device = torch.get_default_device()
    drawn = torch.randn(shape, dtype=torch.float64, device="cpu")
    return drawn.to(dtype).to(device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic."""
    return torch.promote_types(dtype, torch.float32)


def norm(dtype: torch.dtype) -> None:
    """Call norms of narrow and wide rows, whole and cut out of wider ones."""
    from lockstep.optimized.kernels import norm as kernels

    for rows, width in ((1, 6), (40, 19), (3, 130), (2, 2688)):
        both = randn(2, rows, width + 8, dtype=dtype)
        weight = randn(width, dtype=dtype)
        for hidden, update in (both[..., 3 : 3 + width], both[..., :width].clone()):
            kernels.rms_norm(hidden, weight, 1e-5)
            kernels.add_rms_norm(hidden.to(wide(dtype)), update, weight, 1e-5)
    for rows, width, groups in ((3, 30, 3), (2, 66, 1), (2, 4096, 8)):
        hidden, gate = randn(2, rows, width, dtype=dtype)
        weight = randn(width, dtype=dtype)
        kernels.gated_group_rms_norm(hidden, gate, weight, 1e-5, groups)


def mlp(dtype: torch.dtype) -> None:
    """Call every activation on rows of one part and of several."""
    from lockstep.optimized.kernels import mlp as kernels

    for activation in get_args(Activation):
        for inputs in (
            randn(3, 74, dtype=dtype),
            randn(2, 2300, dtype=dtype)[:, 3:2253],
        ):
            kernels.activate(inputs, activation)
            kernels.activate_gated(inputs, activation)


def steps(chunk: int) -> Iterator[BatchMetadata]:
    """Make steps of ragged rows of both kinds, of one kind, whole and padded."""
    from tests import plans
    from tests.plans import Padding, Slice

    plans.NUM_BLOCKS = 64
    sizes = plans.make_sizes(chunk)
    decodes = [Slice(start, start + 1) for start in (7, 2 * chunk)]
    resumed = Slice(chunk, 3 * chunk, snapshots=[2 * chunk], is_resumed=True)
    prefills = [
        Slice(0, 1),
        Slice(chunk - 2, chunk + 3, snapshots=[chunk]),
        resumed,
    ]
    for rows in ((decodes, prefills), ([], prefills), (decodes, [])):
        step = plans.make_step(sizes, *rows)
        yield plans.build("optimized", sizes, step, all_logits=False)
    padding = Padding(2, 2, 5, 1)
    yield plans.build_padded(sizes, plans.make_step(sizes, decodes, prefills), padding)


def conv1d(dtype: torch.dtype) -> None:
    """Convolve by windows of any length, with a bias or without."""
    from lockstep.optimized.kernels import conv1d as kernels

    for batch in steps(16):
        for channels, taps, has_bias in ((13, 2, True), (300, 4, True), (70, 7, False)):
            states = randn(82, channels, taps - 1, dtype=dtype)
            bias = randn(channels, dtype=dtype) if has_bias else None
            layer = randn(channels, taps, dtype=dtype), bias, states, batch
            count = batch.padded_shape.tokens
            inputs = randn(count, channels + 3, dtype=dtype)[:, :channels]
            if first := batch.num_decode_tokens:
                kernels.conv_decode(inputs[:first], *layer)
            if first < count:
                kernels.conv_prefill(inputs[first:], *layer)


#: Of no tile's size; of a model's, with fewer heads.
MAMBAS = (
    (MambaConfig(num_heads=4, head_dim=5, state_size=7, num_groups=2), (16, 64)),
    (MambaConfig(num_heads=4, head_dim=64, state_size=128, num_groups=1), (128, 256)),
)


def scan(dtype: torch.dtype) -> None:
    """Scan in chunks of several lengths, by heads of both sizes."""
    from lockstep.optimized.kernels import scan as kernels

    for config, chunks in MAMBAS:
        heads = (randn(config.num_heads, dtype=wide(dtype)) for _ in range(3))
        A, dt_bias, D = heads
        layer: Any = SimpleNamespace(A=-A.abs(), dt_bias=dt_bias, D=D)
        shape = config.num_heads, config.head_dim, config.state_size
        states = randn(82, *shape, dtype=wide(dtype))
        for chunk in chunks:
            sized = replace(config, scan_chunk_size=chunk)
            for batch in steps(chunk):
                count, first = batch.padded_shape.tokens, batch.num_decode_tokens
                tokens = scan_tokens(config, count, dtype)
                given: Any = layer, sized, states, batch
                if first:
                    decoding = ScanTokens(*(part[:first] for part in tokens))
                    kernels.scan_decode(decoding, *given)
                if first < count:
                    prefilling = ScanTokens(*(part[first:] for part in tokens))
                    kernels.scan_prefill(prefilling, *given)


def scan_tokens(config: MambaConfig, count: int, dtype: torch.dtype) -> ScanTokens:
    """Draw tokens that are views of wider rows, as a model's are."""
    states = config.num_groups * config.state_size
    convolved = randn(count, config.conv_channels, dtype=dtype)
    x, B, C = convolved.split([config.inner_size, states, states], dim=1)
    by_group = (part.unflatten(1, (config.num_groups, -1)) for part in (B, C))
    dt = randn(count, config.num_heads + 5, dtype=dtype)[:, 5:]
    return ScanTokens(x.unflatten(1, (config.num_heads, -1)), dt, *by_group)


def attention(dtype: torch.dtype) -> None:
    """Append and attend in blocks of two sizes, by small heads and a model's."""
    from lockstep.config import RotaryConfig
    from lockstep.optimized.kernels import attention as kernels

    for heads, kv_heads, width, block in ((9, 3, 6, 16), (8, 2, 128, 256)):
        pools = randn(2, 65, block, kv_heads, width, dtype=dtype)
        for batch in steps(block):
            count, first = batch.padded_shape.tokens, batch.num_decode_tokens
            queries = randn(count, heads, width + 2, dtype=dtype)[..., 2:]
            keys, values = randn(2, count, kv_heads, width, dtype=dtype)
            config = RotaryConfig(part=1.0 if block > 16 else 0.6)
            new = keys, values, pools[0], pools[1], batch.kv_index
            kernels.append_rotary_kv(queries, *new, batch.positions, config)
            kernels.append_kv(*new)
            given: Any = *pools, 0.3, batch
            if first:
                kernels.attend_decode(queries[:first], *given)
            if first < count:
                kernels.attend_prefill(queries[first:], *given)
        # So few blocks that they are not split.
        short: Any = SimpleNamespace(
            block_tables=torch.zeros(2, 1, dtype=torch.int64),
            context_lens=torch.tensor([5, 0]),
        )
        pools = randn(2, 1, 16, kv_heads, width, dtype=dtype)
        queries = randn(2, heads, width, dtype=dtype)
        kernels.attend_decode(queries, pools[0], pools[1], 0.3, short)


def moe(dtype: torch.dtype) -> None:
    """Route in every way, and apply experts in tiles of every height."""
    from lockstep.optimized.kernels import moe as kernels
    from tests.factories import LATENT_MOE, MOE, SOFTMAX_MOE

    for config in (MOE, LATENT_MOE, SOFTMAX_MOE, replace(MOE, normalize_weights=False)):
        hidden = randn(9, 19, dtype=dtype)
        router = randn(config.num_experts, 19, dtype=wide(dtype))
        correction = None
        if config.scoring == "sigmoid":
            correction = randn(config.num_experts, dtype=wide(dtype))
        mask = torch.arange(9) % 4 < 3
        kernels.route(hidden, router, correction, config, mask)
    few = MoeConfig(4, 2, expert_size=10, shared_size=0)
    for config, tokens, width in (
        (few, 5, 19),
        (replace(few, gated=True, activation="silu"), 5, 19),
        (replace(few, activation="gelu", expert_size=130), 5, 256),
        (few, 40, 19),
        (few, 100, 19),
        (replace(few, gated=True, activation="silu", expert_size=160), 100, 128),
        # More pairs than are counted at a time.
        (few, 1100, 16),
    ):
        rows = config.expert_size * (2 if config.gated else 1)
        ids = torch.stack((torch.arange(tokens) % 3, torch.full((tokens,), 3)), 1)
        ids[::5] = -1
        kernels.apply_experts(
            randn(tokens, width, dtype=dtype),
            ids,
            randn(tokens, 2, dtype=wide(dtype)),
            randn(4, rows, width, dtype=dtype),
            randn(4, width, config.expert_size, dtype=dtype),
            config,
        )


def sampler(dtype: torch.dtype) -> None:
    """Draw with every filter, from a vocabulary of one chunk and of several."""
    from lockstep.optimized.kernels import sampler as kernels
    from tests.factories import make_draws

    for vocab in (37, 5000):
        logits = randn(6, vocab, dtype=dtype)
        logits[3, ::2] = -torch.inf
        # Tokens are drawn from float32 logits alone.
        if dtype == torch.float32:
            draws = make_draws(
                6,
                temperatures=[0.0, 0.7, 1.0, 1.0, 2.0, 1.0],
                top_ks=[5, 0, 2, 0, 7, vocab],
                top_ps=[0.5, 0.9, 1.0, 0.6, 0.3, 1.0],
                min_ps=[0.0, 0.1, 0.0, 0.0, 0.02, 0.0],
                seeds=[1, 2, 3, 4, 5, 6],
                positions=[0, 1, 2**31, 2**40, 4, 5],
                banned_ids=[[], [3], [1, 2], [], [0], []],
            )
            kernels.sample(logits, draws)
        kernels.log_probabilities(logits)


def snapshots(dtype: torch.dtype) -> None:
    """Copy states of one tile, and of more than all programs take at a time."""
    from lockstep.optimized.kernels import snapshots as kernels

    for shape in ((4, 5, 7), (9, 64, 128)):
        caches: Any = SimpleNamespace(
            conv=randn(2, 6, 13, 3, dtype=dtype),
            ssm=randn(2, 6, *shape, dtype=wide(dtype)),
        )
        sources, targets = torch.tensor([[0, 1, 2], [3, 5, 4]])
        kernels.copy_states(caches, sources, targets, 5)


KERNELS = {
    work.__name__: work
    for work in (norm, mlp, conv1d, scan, attention, moe, sampler, snapshots)
}


def run_kernels(module: str, dtypes: Sequence[str] = DTYPES) -> None:
    """Call all of a module's kernels, in one dtype after the other."""
    for dtype in dtypes:
        torch.manual_seed(0)
        KERNELS[module](torch_dtype(dtype))


# Whole engines.

#: Models and dtypes that an engine of each mode runs.
ENGINES: dict[str, tuple[tuple[str, DTypeName], ...]] = {
    "off": (("hybrid", "float32"), ("latent", "bfloat16"), ("scaled", "float32")),
    "padded": (("hybrid", "bfloat16"), ("turned", "float32"), ("scaled", "bfloat16")),
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.5, "stop_token_ids": [3, 5], "min_tokens": 2},
    {"temperature": 1.3, "top_k": 2},
)


def run_engine(graphs: str) -> None:
    """Serve prompts in steps of all kinds, and one again from what was stored."""
    from tests.factories import model_config

    for name, dtype in ENGINES[graphs]:
        serve(replace(model_config(name), dtype=dtype), graphs, (45, 10, 31, 1))


def serve(config: ModelConfig, graphs: str, lengths: Sequence[int]) -> None:
    """Serve prompts of some lengths by an engine, and see that all has happened."""
    from tests.engines import Run, drain, make_engine
    from tests.scenarios.common import is_mixed, text

    engine = make_engine(
        config,
        "optimized",
        device=torch.get_default_device(),
        graphs=graphs,
        kernels="triton",
        max_tokens_per_step=40,
        debug=("integrity",),
    )
    run = Run()
    for index, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=4, seed=index, **SAMPLINGS[index])
        engine.add(text(length, index), sampling, str(index))
    drain(engine, run)
    engine.add(text(lengths[0]), SamplingParams(max_tokens=2, seed=0), "again")
    drain(engine, run)
    shapes = [record.shape for record in run.records]
    assert any(map(is_mixed, run.records)), "no step was mixed"
    assert any(not shape.decode_requests for shape in shapes), "none was all prefill"
    assert any(not shape.prefill_requests for shape in shapes), "none was all decode"
    rows = [row for record in run.records for row in record.rows]
    if config.num_mamba_layers:
        assert any(row.snapshots for row in rows), "no state was stored"
    assert run.outputs["again"].cache.num_skipped_tokens, "nothing was restored"
    print(f"{config.layer_pattern} {config.dtype}: {len(shapes)} steps", flush=True)


# Faults that a checker must see, or it sees nothing.


@triton.jit
def _write_past_kernel(target, SIZE: tl.constexpr):
    """Write twice as far as there is memory."""
    lanes = tl.arange(0, 2 * SIZE)
    tl.store(target + lanes, lanes)


#: Each thread writes a word, and reads that of a thread of another warp at once. Triton
#: itself always waits in between.
_RACE = tl.constexpr("""{
    .shared .align 4 .b32 raced[128];
    .reg .b32 thread, place, base;
    mov.u32 thread, %tid.x;
    mov.u32 base, raced;
    mad.lo.u32 place, thread, 4, base;
    st.volatile.shared.b32 [place], $1;
    xor.b32 thread, thread, 32;
    mad.lo.u32 place, thread, 4, base;
    ld.volatile.shared.b32 $0, [place];
}""")


@triton.jit
def _race_kernel(target, SIZE: tl.constexpr):
    """Read shared memory that another warp writes, without waiting for it."""
    lanes = tl.arange(0, SIZE)
    found = tl.inline_asm_elementwise(
        _RACE, "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(target + lanes, found)


def plant(kernel: Any) -> None:
    """Launch a faulty kernel."""
    target = torch.zeros(THREADS, dtype=torch.int32)
    kernel[(1,)](target, SIZE=THREADS, num_warps=THREADS // 32)
    torch.cuda.synchronize()


WORKS: dict[str, Callable[[], None]] = {
    **{name: partial(run_kernels, name) for name in KERNELS},
    **{
        f"{name}:{dtype}": partial(run_kernels, name, [dtype])
        for name in KERNELS
        for dtype in DTYPES
    },
    **{f"engine-{mode}": partial(run_engine, mode) for mode in ENGINES},
    "planted-write": partial(plant, _write_past_kernel),
    "planted-race": partial(plant, _race_kernel),
}


def main() -> None:
    """Do one piece of work, and write down what was launched."""
    parser = argparse.ArgumentParser(description="Work for a memory checker.")
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--launches", type=Path, help="where to write what was launched"
    )
    options = parser.parse_args()
    torch.set_default_device(options.device)
    notes = note_launches()
    WORKS[options.work]()
    if options.launches:
        made = {name: asdict(note) for name, note in notes.items() if note.count}
        options.launches.write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main()
