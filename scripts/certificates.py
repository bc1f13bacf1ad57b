"""Make the certificates of the demo model and of a tiny checkpoint of each family.

    python scripts/certificates.py [--device cuda] [--jobs 7] [--commit COMMIT]

The tiny ones are those of the tests, saved by `transformers` itself, but rounded. Exit
status 1 means that one is not passed. The reference runs on the CPU in any case: its
loops are faster there than on a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.verify import certify, library  # noqa: E402
from lockstep.verify.certificate import find_commit  # noqa: E402
from tests.checkpoints import BASES, MOE, save  # noqa: E402

#: What is not as in the base of a family.
FIELDS: dict[str, dict[str, Any]] = {"nemotron_h": MOE}


def make(name: str, device: str, commit: str, output: str) -> tuple[bool, str]:
    """Make one certificate.

    Args:
        name: ``demo`` or a family.
        device: Where transformers and the optimized backend run.
        commit: Of the checkout.
        output: Folder to write to.

    Returns:
        Whether it is passed, and that in words.
    """
    library.hush()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / f"tiny-{name}"
        if name != "demo":
            save_rounded(name, model)
        made = certify(
            "demo" if name == "demo" else model,
            device=device,
            reference_device="cpu",
            commit=commit,
        )
    made.write(output)
    return made.passed, f"{made} ({time.perf_counter() - start:.0f} s)"


def save_rounded(name: str, folder: Path) -> None:
    """Save the tiny checkpoint of a family, its weights rounded to bfloat16.

    A logarithm's last bit depends on the machine; what is rounded does not, so that
    everyone gets the same file.
    """
    save(folder, {"model_type": name, **FIELDS.get(name, {})})
    path = folder / "model.safetensors"
    rounded = {n: w.bfloat16().to(w.dtype) for n, w in load_file(path).items()}
    save_file(rounded, path, {"format": "pt"})


def main() -> int:
    """Make all, several at once."""
    parser = argparse.ArgumentParser(description="Make the certificates.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--commit", help="the checkout's, where git cannot say")
    parser.add_argument(
        "--output", default=str(ROOT / "benchmarks/results/certificates")
    )
    parser.add_argument("names", nargs="*", default=["demo", *BASES])
    chosen = parser.parse_args()
    commit = chosen.commit or find_commit()
    given = chosen.device, commit, chosen.output
    results: list[bool] = []
    # A fresh process each: CUDA does not survive a fork.
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn")) as pool:
        made = [pool.submit(make, name, *given) for name in chosen.names]
        for each in as_completed(made):
            passed, text = each.result()
            results.append(passed)
            print(text, flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
