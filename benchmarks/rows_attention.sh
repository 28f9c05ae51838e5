#!/usr/bin/env bash
# Rows of attention beside SDPA (cuDNN, flash), torch.compile and flex_attention, on one GPU: about ten minutes.
#   benchmarks/rows_attention.sh FOLDER
set -euo pipefail
out=${1:?a folder for the rows}
mkdir -p "$out"
shapes=8x2048x16x1x64,4x4096x8x4x128,2x8192x8x4x128,1x16384x8x4x128,2x8192x8x4x64
bench() { PYTHONPATH=src python3 -m tilemesh bench kernel attention --shapes "$1" --set mask="$2" --set passes="$3" --repeats 12 --json "$out/attention_$2_$3.jsonl"; }
for passes in forward both; do
  bench $shapes causal $passes
  bench 4x4096x8x4x128 window $passes
  bench 4x4096x8x4x128 packed $passes
done
