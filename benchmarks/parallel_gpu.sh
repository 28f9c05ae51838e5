#!/bin/sh
# A laid model on one GPU: the small gate with two ranks sharing it, over gloo and over MPI through the host, and one
# rank over nccl. Under 3 minutes. Usage: sh benchmarks/parallel_gpu.sh FOLDER_FOR_LOGS
set -u
export PYTHONPATH="$PWD/src" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
timeout 170 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -rA --tb=short --durations=6 \
  tests/gpu/test_parallel.py > "$1/parallel_gpu.log" 2>&1
code=$?
tail -25 "$1/parallel_gpu.log"
exit $code
