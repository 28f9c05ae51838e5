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
# Limits come from this machine's calibration: the committed one where it is this machine's, else a quick new one.
$python benchmarks/known_calibration.py || $python -m tilemesh calibrate --quick >"$out/calibrate.txt" 2>&1

for model in gpt2-124m tinyllama-1.1b; do
  timeout 200 $python -m tilemesh bench train "$model" --mesh dp=1 --peers compile \
    --blocks 6 --steps 8 --json "$out/train-$model.jsonl" 2>&1 | tee "$out/train-$model.txt"
done

# The same through the command a user types: some steps, then the run's own rows.
timeout 120 $python -m tilemesh train gpt2-124m --mesh dp=1 --out "$out/run" --transport torch \
  --set train.steps=40,checkpoint.every=0,evaluate.every=0,sample.tokens=20 \
  --json "$out/run-gpt2-124m.jsonl" 2>&1 | tail -30 | tee "$out/run-gpt2-124m.txt"
rm -rf "$out/run/checkpoints"

# Resumed is never stopped, bit for bit, on this GPU.
timeout 100 $python - <<'PY' 2>&1 | tee "$out/resume.txt"
import shutil
from pathlib import Path
from tilemesh.train.config import load
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.train.job import fit
from tilemesh.runs.manifest import Manifest, folder_name
base = "model.layers=3,model.width=256,model.heads=4,model.context=128,train.steps=12,train.batch=8,plan.microbatch=4"
base += ",checkpoint.every=6,evaluate.every=0,sample.tokens=0,train.deterministic=true"
for sets in ("plan.precision=bf16", "plan.precision=bf16-master", "plan.precision=bf16,train.compile=true"):
    config, place = load(mesh="dp=1", sets=[base, sets], gpus=1), Path("/tmp/tilemesh-resume")
    shutil.rmtree(place, ignore_errors=True)
    fit(config, run=place / "whole")
    fit(config, run=place / "parts", stop_after=5)
    fit(resume=place / "parts")
    digests = [
        [one.sha256 for one in Manifest.read(place / name / CHECKPOINTS / folder_name(12)).files]
        for name in ("whole", "parts")
    ]
    print(f"resume {sets}: {'bit for bit' if digests[0] == digests[1] else 'DIFFERS'}", flush=True)
PY
