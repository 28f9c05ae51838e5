#!/bin/sh
# The suite's rows in both dtypes beside every peer; about seven minutes on an H200 with 16 cores.
# Usage: PYTHONPATH=src sh benchmarks/rows_matmul.sh FOLDER
set -u
export TRITON_CACHE_DIR=/tmp/matmul_triton_cache
suite="2048x2048x2048 512x512x512 64x4096x4096 4096x4096x4096 8192x8192x1024 4096x4096x512 8192x8192x8192
4096x11008x4096 2049x2047x2051 1024x1024x1024 16x8192x8192 128x28672x8192 8192x128x8192 3000x3000x3000"
# Kernels that torch.compile will try, compiled for all shapes at once; what was fastest in that crowd is forgotten.
for shape in $suite; do
  TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR=/tmp/matmul_warm/$shape \
    timeout 80 python3 benchmarks/warm_matmul.py "$shape" > /dev/null 2>&1 &
done
wait
export TORCHINDUCTOR_CACHE_DIR=/tmp/matmul_inductor_cache
rm -rf "$TORCHINDUCTOR_CACHE_DIR"
for dtype in float16 bfloat16; do
  # shellcheck disable=SC2086  (a list of shapes)
  python3 benchmarks/rows_matmul.py --repeats 15 --dtype $dtype --out "$1/matmul_rows_h200_$dtype.jsonl" $suite
done
python3 benchmarks/rows_matmul.py --no-compile --c row --repeats 12 --out "$1/matmul_rows_h200_float16_row.jsonl" \
  4096x11008x4096 2048x2048x2048 4096x4096x4096 64x4096x4096
