#!/usr/bin/env bash
# Rows of the operators over rows (softmax, norms, losses) beside eager torch and torch.compile, on one GPU: about five minutes.
#   benchmarks/rows_operators.sh FOLDER
set -euo pipefail
out=${1:?a folder for the rows}
mkdir -p "$out"
bench() { PYTHONPATH=src python3 -m tilemesh bench kernel "$1" --shapes "$2" --set passes="$3" --repeats 12 --json "$out/$1_$3.jsonl"; }
norms=32768x768,16384x4096,8192x8192
bench softmax 16384x1024,8192x8192,4096x32768,512x262144,32x64 forward
bench cross_entropy 8192x50304,8192x128256 both
bench linear_cross_entropy 8192x768x50304,8192x4096x128256 both
for name in rms_norm layer_norm; do
  bench $name $norms,32x64 forward
  bench $name $norms both
done
bench add_rms_norm $norms both
