#!/bin/bash
# Collectives on a machine with cores to spare: calibrate, fit, and rows for 8 ranks over MPI and gloo, in six minutes.
# Runs from the source tree with what the machine has: bash benchmarks/collectives_16core.sh; results go to $OUT.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export PYTHONPATH=src XDG_CACHE_HOME="$OUT/cache" COLUMNS=200
PYTHON=${PYTHON:-python3}
SIZES=${SIZES:-4B,512B,1KiB,8KiB,32KiB,256KiB,1MiB,8MiB,64MiB}
RANKS=${RANKS:-8}
SHARED=flat,flat_one,flat_slices,direct,direct_slices
tilemesh() { timeout "$1" "$PYTHON" -m tilemesh "${@:2}"; }

{
    "$PYTHON" -c 'from tilemesh.measure.machine import this_machine; print(this_machine())'
    nproc
    for pattern in message_passing store_buffering; do
        echo "out of order in 300000 rounds of $pattern: $(timeout 30 "$PYTHON" tests/mpi/litmus_script.py $pattern 300000)"
    done
    tilemesh 40 calibrate --quick
    tilemesh 70 bench collective --fit --quick --ranks "$RANKS" --transport mpi
    # In two, so that running out of time costs one of them.
    tilemesh 75 bench collective all_reduce reduce_scatter --quick --ranks "$RANKS" --transport mpi --sizes "$SIZES" \
        --algorithms $SHARED --json "$OUT/collectives_mpi1_16c.jsonl" --chart "$OUT/collectives_mpi1_16c.svg"
    tilemesh 65 bench collective all_gather all_to_all --quick --ranks "$RANKS" --transport mpi --sizes "$SIZES" \
        --algorithms $SHARED --json "$OUT/collectives_mpi2_16c.jsonl" --chart "$OUT/collectives_mpi2_16c.svg"
    tilemesh 40 bench collective all_reduce --quick --ranks "$RANKS" --transport gloo --algorithms none \
        --sizes ${GLOO_SIZES:-4B,1KiB,32KiB,1MiB,64MiB} --json "$OUT/collectives_gloo_16c.jsonl"
    # What going through us adds to MPI's own call: 20 s at most, and of use by itself.
    tilemesh 60 bench collective --ranks "$RANKS" --transport mpi --sizes 4B --algorithms native --json "$OUT/dispatch_mpi_16c.jsonl"
    "$PYTHON" benchmarks/targets_collectives.py "$OUT"/collectives_*_16c.jsonl
} 2>&1 | tee "$OUT/collectives_16core.txt"
