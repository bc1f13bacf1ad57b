#!/usr/bin/env bash
# All that a GPU machine has to say: tests of both engines and of every kernel, and times.
# Needs python3 with torch, triton, transformers, safetensors, typer, rich, pytest,
# pytest-xdist and hypothesis; installs nothing.
#
#     scripts/gpu_check.sh [FOLDER FOR RESULTS] [COMMIT] [PART ...]
#
# Parts: gpu (tests/gpu), card (a full card, alone), matrix (a pairwise cover of both
# engines), triples (many more rows of it), spec (every layer on the GPU), mutants (faults
# that need a GPU), demo, speed (both backends), kernels (each alone). Only where named:
# i/n, that shard of all rows; sanitizer (needs compute-sanitizer); packages (kernels of
# mamba_ssm and causal_conv1d, looked for in build/packages); certificates; ladder;
# claims.
set -euo pipefail
out=${1:-benchmarks/results}
commit=${2:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
parts=${*:3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out"
# Where tests leave the largest errors that they let pass.
export LOCKSTEP_MEASURED=$(mktemp -d)

named() { [[ " $parts " == *" $1 "* ]]; }

wanted() { [ -z "$parts" ] || named "$1"; }

quiet() { grep -av -e 'capturing graphs' -e pytest_benchmark -e 'warner(' || true; }

{
    echo "commit $commit"
    python3 - <<'PY'
import platform
import torch
import transformers
import triton

print("gpu", torch.cuda.get_device_name())
print("python", platform.python_version())
print("torch", torch.__version__, "triton", triton.__version__)
print("transformers", transformers.__version__)
PY
    status=0
    if wanted gpu; then
        echo "== tests/gpu"
        python3 -m pytest -m gpu tests/gpu -q -n 12 --durations=3 \
            --ignore tests/gpu/test_full_card.py \
            --ignore tests/gpu/test_mamba_ssm.py 2>&1 | quiet || status=1
    fi
    if wanted card; then
        # It leaves no memory for others.
        echo "== tests/gpu/test_full_card.py"
        python3 -m pytest -m gpu tests/gpu/test_full_card.py -q 2>&1 | quiet || status=1
    fi
    if named packages; then
        echo "== tests/gpu/test_mamba_ssm.py"
        LOCKSTEP_TEST_DEVICE=cuda PYTHONPATH=.:build/packages python3 -m pytest -m gpu \
            tests/gpu/test_mamba_ssm.py -q -n 6 --durations=3 2>&1 | quiet || status=1
    fi
    if wanted matrix; then
        echo "== tests/equivalence/test_engine.py on the GPU"
        LOCKSTEP_MATRIX_DEVICE=cuda python3 -m pytest -q -n 8 \
            tests/equivalence/test_engine.py 2>&1 | quiet || status=1
    fi
    if named sanitizer; then
        echo "== compute-sanitizer"
        python3 scripts/sanitize.py --commit "$commit" --jobs 14 \
            --output "$out/sanitizer.json" 2>&1 | quiet || status=1
    fi
    for shard in triples $(grep -o '[0-9]*/[0-9]*' <<< "$parts" || true); do
        if wanted "$shard"; then
            echo "== rows of the matrix: $shard"
            python3 scripts/gpu_matrix.py "$shard" --commit "$commit" \
                --output "$out/gpu_matrix.json" 2>&1 | quiet || status=1
        fi
    done
    if wanted spec; then
        # One file needs a package that is only in CI.
        echo "== tests/spec on the GPU"
        LOCKSTEP_TEST_DEVICE=cuda python3 -m pytest -q -n 8 tests/spec \
            --ignore tests/spec/test_scan_mamba_ssm.py 2>&1 | quiet || status=1
    fi
    if wanted mutants; then
        echo "== faults that need a GPU"
        LOCKSTEP_MEASURED='' python3 scripts/mutants.py --gpu --jobs 5 2>&1 | quiet || status=1
    fi
    if wanted demo; then
        echo "== lockstep demo"
        COLUMNS=80 python3 -m lockstep demo --device cuda 2>/dev/null || status=1
    fi
    echo "status $status"
} | tee "$out/gpu_tests.txt"

python3 - "$LOCKSTEP_MEASURED" "$out/measured.json" "$commit" <<'PY'
import json
import sys
from pathlib import Path

import torch

from tests.tolerances import read_measured

folder, output, commit = sys.argv[1:]
about = {"commit": commit, "gpu": torch.cuda.get_device_name(), "unit": "roundoffs"}
found = about | {"largest": read_measured(Path(folder))}
Path(output).write_text(json.dumps(found, indent=2) + "\n")
PY

# One that fails keeps no other from being run.
failed=0
if wanted speed; then
    python3 -m benchmarks.backend_speed --device cuda --commit "$commit" \
        --output "$out/backend_speed_cuda.json" || failed=1
fi
if wanted kernels; then
    python3 -m benchmarks.kernels --commit "$commit" "$out/kernels.json" || failed=1
fi
if named certificates; then
    python3 scripts/certificates.py --device cuda --jobs 7 --commit "$commit" \
        --output "$out/certificates" || failed=1
fi
if named ladder; then
    python3 -m lockstep ladder --device cuda --commit "$commit" --output "$out" ||
        failed=1
fi
if named claims; then
    python3 -m benchmarks.claims --commit "$commit" --output "$out" || failed=1
fi
grep -q 'status 0' "$out/gpu_tests.txt" && [ "$failed" = 0 ]
