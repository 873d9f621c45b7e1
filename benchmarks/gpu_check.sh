#!/usr/bin/env bash
# All checks that need an accelerator, in one go and under eight minutes: two gloo workers
# share one device. Prints the tests' lines, then one JSON line for each figure.
#   benchmarks/gpu_check.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo '{"benchmark": "gpu_check", "skipped": "no CUDA device"}'
  exit 0
}
timeout 300 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests
timeout 120 "$PYTHON" benchmarks/gpu_overlap.py
