#!/bin/sh
# A laid model on one GPU: the small gate with two ranks sharing it, over gloo and over MPI through the host, and one
# rank over nccl; then training in pp 2, ZeRO 1 to 3 over dp 2, and with activations or weights on the host, against one
# process, loss by loss in float64. Under 5 minutes. The layouts alone take about 2:
# Usage: sh benchmarks/parallel_gpu.sh FOLDER_FOR_LOGS [layouts]
set -u
export PYTHONPATH="$PWD/src" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
only=""
[ "${2:-}" = layouts ] && only="-k layouts_on_one_gpu"
timeout 290 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -rA --tb=short --durations=6 $only \
  tests/gpu/test_parallel.py > "$1/parallel_gpu.log" 2>&1
code=$?
tail -25 "$1/parallel_gpu.log"
exit $code
