#!/bin/bash
# Offloading on one GPU of 141 GB with 128 GiB of host memory: predicted and measured slow-down, one row per case.
# Usage: bash benchmarks/offload_h200.sh FOLDER [rehearsal | passes | full]   (no name: all three; about 150 s)
#   rehearsal  1.1 B parameters, optimizer states on the host, beside the same steps without moving
#   passes     the same with activations, then weights, then both on the host
#   full       9 B parameters in bf16-master: 134 GiB of weights, gradients and states, of which 101 GiB on the host
# Host memory of `full`: 8.99 B parameters x 12 B = 100.4 GiB page-locked, once; weights are drawn 32 parameters at a time
# before that (up to 8 GiB) and go to the GPU; nothing else is held twice. The GPU holds 2 + 2 bytes per parameter
# (33.5 GiB), activations, and the states of three parts.
set -u
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
export PYTHONPATH="$PWD/src" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
python=${PYTHON:-python3}
rows="$out/offload.jsonl"
begun=$SECONDS
$python benchmarks/known_calibration.py || timeout 60 $python -m tilemesh calibrate --quick >"$out/calibrate.txt" 2>&1
echo "== calibrated after $((SECONDS - begun)) s"
nine="model.layers=40,model.width=4096,model.heads=32,model.kv_heads=8,model.mlp_width=14336,model.vocabulary=32000"

step() { timeout 120 $python benchmarks/offload_step.py tinyllama-1.1b --out "$rows" "$@"; }

for name in ${*:-rehearsal passes full}; do
    case $name in
    rehearsal) step --batch 8 --offload optimizer --steps 5 --compare ;;
    passes)
        for what in activations weights activations+weights; do step --batch 8 --accumulation 2 --offload $what --steps 5 --compare; done
        ;;
    full)
        free -g | head -2
        step --set "$nine" --batch 4 --offload optimizer --steps 4
        ;;
    *) echo "no part is called $name: rehearsal, passes, full" && exit 2 ;;
    esac >"$out/offload_$name.txt" 2>&1
    code=$?
    cat "$out/offload_$name.txt"
    echo "== $name: exit $code, $((SECONDS - begun)) s since the start"
done
