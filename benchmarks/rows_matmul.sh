#!/bin/sh
# The suite's rows in both dtypes beside every peer; about seven minutes on an H200 with 16 cores.
# Usage: PYTHONPATH=src sh benchmarks/rows_matmul.sh FOLDER
set -u
export TRITON_CACHE_DIR=/tmp/matmul_triton_cache
# Kernels that torch.compile will try, compiled for all shapes at once; what was fastest in that crowd is forgotten.
for shape in $(python3 -c "from tilemesh.kernels.matmul.cost import SUITE; print(*SUITE)"); do
  TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR=/tmp/matmul_warm/$shape \
    timeout 80 python3 benchmarks/warm_matmul.py "$shape" > /dev/null 2>&1 &
done
wait
export TORCHINDUCTOR_CACHE_DIR=/tmp/matmul_inductor_cache
rm -rf "$TORCHINDUCTOR_CACHE_DIR"
bench() { python3 -m tilemesh bench kernel matmul "$@"; }
for dtype in float16 bfloat16; do
  bench --repeats 15 --dtype $dtype --json "$1/matmul_rows_h200_$dtype.jsonl"
done
bench --no-compile --c row --repeats 12 --shapes 4096x11008x4096,2048x2048x2048,4096x4096x4096,64x4096x4096 \
  --json "$1/matmul_rows_h200_float16_row.jsonl"
