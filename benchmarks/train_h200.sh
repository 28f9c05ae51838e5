#!/bin/bash
# Training on one GPU against plain PyTorch + torch.compile: gpt2-124m (32 x 1024) and tinyllama-1.1b (8 x 2048), bf16.
# Run from the repository's root; rows go to $OUT (default: the current folder), one object a line. About four minutes:
# most of it is compiling. Needs Python 3.12, torch 2.11 and triton 3.6; nothing has to be installed.
set -u
out=${OUT:-.}
export PYTHONPATH=src
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/tilemesh-inductor}
python=${PYTHON:-python3}

$python - <<'PY'
import sys, torch, triton
print(sys.version.split()[0], torch.__version__, triton.__version__, torch.cuda.get_device_name())
PY
$python -m tilemesh calibrate --quick >"$out/calibrate.txt" 2>&1 || echo "no calibration: rows have no limit"

for model in gpt2-124m tinyllama-1.1b; do
  timeout 200 $python -m tilemesh bench train "$model" --mesh dp=1 --peers compile \
    --blocks 6 --steps 8 --json "$out/train-$model.jsonl" 2>&1 | tee "$out/train-$model.txt"
done

# The same through the command a user types: some steps, then the run's own rows.
timeout 120 $python -m tilemesh train gpt2-124m --mesh dp=1 --run "$out/run" --transport torch \
  --set train.steps=40,checkpoint.every=0,evaluate.every=0,sample.tokens=20 \
  --json "$out/run-gpt2-124m.jsonl" 2>&1 | tail -30 | tee "$out/run-gpt2-124m.txt"
rm -rf "$out/run/checkpoints"
