#!/bin/sh
# How much of the gradient exchange backward hides: 4 ranks on 16 cores, over MPI and gloo, small and larger buckets.
# Under 4 minutes. Usage: sh benchmarks/overlap_16_cores.sh FOLDER_FOR_ROWS
set -u
export PYTHONPATH="$PWD/src" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
nproc
for transport in mpi torch; do
  for bucket in 1048576 8388608; do
    timeout 60 python3 -m tilemesh bench exchange --ranks 4 --transport $transport --model medium --rows 2 --tokens 64 \
      --bucket-bytes $bucket --repeats 12 --json "$1/overlap_${transport}_${bucket}.jsonl"
  done
done
