#!/usr/bin/env bash
# Layouts of the tiny preset on this machine, each predicted before it runs, then all of them graded.
#   benchmarks/plan_layouts.sh [FOLDER] [STEPS] [LAYOUT...]     (about five minutes on two cores, alone on the machine)
# Once before: tilemesh bench collective --fit --ranks 2,4 --sizes 16B..16MiB --quick
# LAYOUT: names from below; none: all. CALIBRATE=no: as this machine was calibrated before. UNTIL=SECONDS: no layout
# begins after them, and those that ran are graded. PYTHON=python3: tilemesh from PYTHONPATH instead of the command.
set -eu
out=${1:-runs/layouts} steps=${2:-18} grades=() only=" ${*:3} "
tilemesh() { if [[ -n ${PYTHON:-} ]]; then "$PYTHON" -m tilemesh "$@"; else command tilemesh "$@"; fi; }
[[ ${CALIBRATE:-} == no ]] || tilemesh calibrate
run() {
    name=$1
    shift
    [[ $only == "  " || $only == *" $name "* ]] || return 0
    ((SECONDS < ${UNTIL:-100000})) || return 0
    tilemesh train --out "$out/$name" "$@" \
        --set "train.steps=$steps,checkpoint.every=0,evaluate.every=0,sample.tokens=0"
    grades+=(--grade "$name")
}
run one --mesh dp=1 --set plan.microbatch=16
run one-acc --mesh dp=1 --set plan.microbatch=4
run dp2 --mesh dp=2 --set plan.microbatch=8
run dp2-acc --mesh dp=2 --set plan.microbatch=2
run tp2 --mesh tp=2 --set plan.microbatch=16
run tp2-seq --mesh tp=2 --set plan.microbatch=16,plan.sequence_parallel=true
run dp4 --mesh dp=4 --set plan.microbatch=4
run dp2tp2 --mesh dp=2,tp=2 --set plan.microbatch=8
run tp4 --mesh tp=4 --set plan.microbatch=16
run pp2 --mesh pp=2 --set plan.microbatch=4,plan.accumulation=4
run pp2-zbv --mesh pp=2 --set plan.microbatch=4,plan.accumulation=4,plan.schedule=zb-v
run dp2pp2 --mesh dp=2,pp=2 --set plan.microbatch=2,plan.accumulation=4
run dp2-zero1 --mesh dp=2 --set plan.microbatch=8,plan.zero=1
run dp4-zero3 --mesh dp=4 --set plan.microbatch=4,plan.zero=3
cd "$out"
tilemesh plan "${grades[@]}" --json grades.jsonl
