#!/usr/bin/env bash
# All that a GPU machine has to say about the reference engine: its tests and its speed.
# Needs python3 with torch, transformers, safetensors, typer, rich, pytest, hypothesis;
# installs nothing. Usage: scripts/gpu_check.sh [FOLDER FOR RESULTS] [COMMIT]
set -euo pipefail
out=${1:-benchmarks/results}
commit=${2:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out"

{
    echo "commit $commit"
    python3 - <<'PY'
import platform
import torch
import transformers

print("gpu", torch.cuda.get_device_name())
print("python", platform.python_version())
print("torch", torch.__version__, "transformers", transformers.__version__)
PY
    python3 -m pytest -m gpu tests/gpu -q --durations=3
    # Every layer again, on the GPU; one file needs a package that is only in CI.
    LOCKSTEP_TEST_DEVICE=cuda python3 -m pytest tests/spec -q -n 4 \
        --ignore tests/spec/test_scan_mamba_ssm.py
} | tee "$out/gpu_tests.txt"

bandwidth=$(python3 - <<'PY'
import torch

source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
target = torch.empty_like(source)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for timed in (False, True):
    begin.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
print(5 * 2 * source.numel() / (begin.elapsed_time(end) / 1e3))
PY
)
python3 -m benchmarks.reference_speed --device cuda --bandwidth "$bandwidth" \
    --commit "$commit" --output "$out/reference_speed_cuda.json"
python3 -m benchmarks.reference_speed --device cpu \
    --commit "$commit" --output "$out/reference_speed_cpu.json"
