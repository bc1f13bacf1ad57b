#!/usr/bin/env bash
# All that a GPU machine has to say about the reference engine: its tests and its speed.
# Results go to the folder given, by default benchmarks/results; needs nothing installed
# beyond what `make test-gpu` needs. Usage: scripts/gpu_check.sh [FOLDER] [COMMIT]
set -euo pipefail
out=${1:-benchmarks/results}
commit=${2:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$out"

python3 -m pytest -m gpu tests/gpu -q --durations=5 | tee "$out/gpu_tests.txt"

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
