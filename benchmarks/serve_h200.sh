#!/usr/bin/env bash
# Serving on one H200: decode steps at batch 1 and 64 with 1,024 tokens each, 256 requests of 100-1,024 prompt and output
# tokens, and transformers' continuous batching beside ours on a smaller load. Random weights, 1.1 B and 8 B Llama shapes.
# Usage: benchmarks/serve_h200.sh FOLDER      (about 170 s in all; each part has a limit of its own)
set -u
out=${1:?the folder for the rows}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
"$python" benchmarks/known_calibration.py || echo "no calibration: the datasheet's figures are the limit"
serve() { # NAME SECONDS ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  timeout "$seconds" "$python" -m tilemesh bench serve "$@" --device cuda --dtype bf16 --predict machine \
    --json "$out/$name.jsonl" > "$out/$name.txt" 2>&1 || echo "$name ended with code $?" | tee -a "$out/$name.txt"
}
mix=(--requests 256 --prompt 100-1024 --output 100-1024 --running 256 --step-tokens 2048 --blocks 1 --steps 1,64)
serve serve_1b 55 tinyllama-1.1b "${mix[@]}"
serve serve_8b 85 llama-3-8b "${mix[@]}"
serve serve_1b_peers 60 tinyllama-1.1b --requests 128 --prompt 128 --output 64 --running 128 --blocks 1 \
  --peers transformers-continuous
tail -n 40 "$out"/serve_*.txt
