#!/bin/bash
# All that needs a GPU machine, from one door: tests first, then rows. Each part says how long it took and how it ended.
# Usage: bash benchmarks/gpu_machine.sh FOLDER [kernels comm parallel overlap | collectives train | rows]
# (the groups take about seven, nine and seven minutes on an H200 with 16 cores; all of them without a name).
set -u
cd "$(dirname "$0")/.."
mkdir -p "$1"
OUT=$(cd "$1" && pwd)
shift
export OUT PYTHONPATH="$PWD/src" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
tests() { timeout 240 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --tb=short "$@"; }

part() {
    case $1 in
    kernels) mkdir -p "$OUT/kernels" && sh benchmarks/parallel_gpu_tests.sh "$OUT/kernels" && tests tests/gpu/test_gpu_timing.py ;;
    comm) tests tests/mpi/test_comm_cuda.py ;;
    parallel) sh benchmarks/parallel_gpu.sh "$OUT" ;;
    overlap) sh benchmarks/overlap_16_cores.sh "$OUT" ;;
    collectives) bash benchmarks/collectives_16core.sh ;;
    train) bash benchmarks/train_h200.sh && tests tests/gpu/test_train.py ;;
    rows) python3 benchmarks/known_calibration.py; sh benchmarks/rows_matmul.sh "$OUT" ;;
    *) echo "no part is called $1: kernels, comm, parallel, overlap, collectives, train, rows"; return 2 ;;
    esac
}

for name in ${*:-kernels comm parallel overlap collectives train rows}; do
    begun=$SECONDS
    part "$name" >"$OUT/$name.txt" 2>&1
    code=$?
    tail -n 20 "$OUT/$name.txt"
    echo "== $name: exit $code after $((SECONDS - begun)) s"
done
