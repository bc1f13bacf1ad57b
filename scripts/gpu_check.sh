#!/usr/bin/env bash
# All that a GPU machine has to say: tests of both engines and of every kernel, and times.
# Needs python3 with torch, triton, transformers, safetensors, typer, rich, pytest and
# hypothesis, with pytest-xdist for more than one process; installs nothing.
#
#     scripts/gpu_check.sh [FOLDER FOR RESULTS] [COMMIT] [PART ...]
#
# Parts: gpu (tests/gpu), card (a full card, alone), matrix (a pairwise cover of both
# engines), spec (every layer on the GPU), mutants (faults that need a GPU), demo, speed
# (both backends), kernels (each alone). Only where named: triples (many more rows of the
# matrix); i/n, that shard of all rows; bfloat16, all rows in it; sanitizer (needs
# compute-sanitizer); packages (kernels of mamba_ssm and causal_conv1d, looked for in
# build/packages); certificates; ladder; claims.
#
# What tests say goes to gpu_tests/PART.txt, so that parts may be run one at a time.
set -uo pipefail
out=${1:-benchmarks/results}
commit=${2:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
parts=${*:3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
python3 - <<'PY' || exit
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("torch finds no GPU, and every part needs one")
PY
mkdir -p "$out/gpu_tests"
# Where tests leave the largest errors that they let pass.
LOCKSTEP_MEASURED=$(mktemp -d)
export LOCKSTEP_MEASURED
failed=0

named() { [[ " $parts " == *" $1 "* ]]; }

wanted() { [ -z "$parts" ] || named "$1"; }

# Run a command; one that fails keeps no other from being run.
run() {
    "$@" || {
        echo "failed: $*"
        failed=1
    }
}

about() {
    echo "commit $commit"
    PYTHONPATH=.:build/packages python3 - <<'PY'
import datetime
import platform
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

print("date", datetime.datetime.now(datetime.UTC).date())
print("gpu", torch.cuda.get_device_name())
print("python", platform.python_version())
for name in ("torch", "triton", "transformers"):
    print(name, version(name))
# Of these two, only one part needs any; they may be there without metadata.
for name in ("mamba_ssm", "causal_conv1d"):
    if (spec := find_spec(name)) and spec.origin:
        found = re.search(r'__version__ = "(.+)"', Path(spec.origin).read_text())
        print(name, found[1] if found else "of an unknown version")
PY
}

# Write down what a part says: about PART COMMAND...
note() {
    local file=$out/gpu_tests/$1.txt
    echo "== $1"
    {
        about
        echo
        "${@:2}" 2>&1 | grep -av -e 'capturing graphs' -e pytest_benchmark -e 'warner('
        # Of the command; grep's only says whether anything was left.
        local status=${PIPESTATUS[0]}
        [ "$status" = 0 ] || echo "failed with status $status"
    } | tee "$file"
    ! grep -q '^failed with status' "$file" || failed=1
}

# Warnings name places on this machine.
export PYTEST_ADDOPTS=--disable-warnings

# So many processes, or as many as cores and memory of the GPU allow.
processes() {
    python3 - "$1" <<'PY'
import os
import sys

import torch

#: Memory that one process may want: some tests are of real sizes.
GIB_EACH = 11

memory = torch.cuda.get_device_properties(0).total_memory >> 30
count = min(int(sys.argv[1]), len(os.sched_getaffinity(0)), memory // GIB_EACH)
print(max(1, count))
PY
}

# Run tests in so many processes at most.
tests() {
    local count spread=()
    count=$(processes "$1")
    if [ "$count" -gt 1 ] && python3 -c "import xdist" 2> /dev/null; then
        spread=(-n "$count")
    fi
    python3 -m pytest -q "${spread[@]}" "${@:2}"
}

if wanted gpu; then
    note gpu tests 12 -m gpu tests/gpu --durations=3 \
        --ignore tests/gpu/test_full_card.py --ignore tests/gpu/test_mamba_ssm.py
fi
if wanted card; then
    # It leaves no memory for others.
    note card tests 1 -m gpu tests/gpu/test_full_card.py
fi
# An import would need more than their operators do.
have_packages() {
    python3 - <<'PY'
import sys
from importlib.util import find_spec

sys.exit(not all(map(find_spec, ("mamba_ssm", "causal_conv1d"))))
PY
}

if named packages; then
    if [ -d build/packages ] || have_packages; then
        LOCKSTEP_TEST_DEVICE=cuda PYTHONPATH=.:build/packages note packages tests 6 \
            -m gpu tests/gpu/test_mamba_ssm.py --durations=3
    else
        echo "Left out: packages, which needs mamba_ssm and causal_conv1d, installed or" \
            "in build/packages"
    fi
fi
if wanted matrix; then
    LOCKSTEP_MATRIX_DEVICE=cuda note matrix tests 8 tests/equivalence/test_engine.py
fi
if wanted spec; then
    # One file needs a package that is only in CI.
    LOCKSTEP_TEST_DEVICE=cuda note spec tests 8 tests/spec \
        --ignore tests/spec/test_scan_mamba_ssm.py
fi
if wanted mutants; then
    COLUMNS=150 LOCKSTEP_MEASURED='' note mutants python3 scripts/mutants.py --gpu \
        --jobs "$(processes 5)"
fi
if wanted demo; then
    COLUMNS=80 note demo python3 -m lockstep demo --device cuda
fi
python3 - "$LOCKSTEP_MEASURED" "$out/gpu_tests/largest_errors.json" "$commit" <<'PY'
import json
import sys
from pathlib import Path

import torch

from tests.tolerances import read_measured

folder, output, commit = sys.argv[1:]
before = json.loads(Path(output).read_text()) if Path(output).exists() else {}
if before.get("commit") == commit:
    # Parts that were run by themselves.
    Path(folder, "before.json").write_text(json.dumps(before["largest"]))
if found := read_measured(Path(folder)):
    about = {"commit": commit, "gpu": torch.cuda.get_device_name()}
    text = json.dumps(about | {"unit": "roundoffs", "largest": found}, indent=2)
    Path(output).write_text(text + "\n")
PY
if named sanitizer; then
    run python3 scripts/sanitize.py --commit "$commit" --jobs 14 \
        --output "$out/sanitizer.json"
fi
for shard in $(grep -oE 'triples|[0-9]+/[0-9]+' <<< "$parts"); do
    run python3 scripts/gpu_matrix.py "$shard" --commit "$commit" \
        --output "$out/gpu_matrix.json"
done
if named bfloat16; then
    run python3 scripts/gpu_matrix.py 0/1 --select short_numbers --commit "$commit" \
        --output "$out/gpu_matrix_bfloat16.json"
fi
if wanted speed; then
    run python3 -m benchmarks.backend_speed --device cuda --commit "$commit" \
        --output "$out/backend_speed_cuda.json"
fi
if wanted kernels; then
    run python3 -m benchmarks.kernels --commit "$commit" "$out/kernels.json"
fi
if named certificates; then
    run python3 scripts/certificates.py --device cuda --jobs 7 --commit "$commit" \
        --output "$out/certificates"
fi
if named ladder; then
    run python3 -m lockstep ladder --device cuda --commit "$commit" --output "$out"
fi
if named claims; then
    run python3 -m benchmarks.claims --commit "$commit" --output "$out"
fi
exit "$failed"
