#!/usr/bin/env bash
# A training step on a machine with cores to spare (Linux), from source with what is installed, GPUs hidden:
#   bash benchmarks/training_step_16core.sh FOLDER [SECONDS] [PART...]
# Parts: layouts (ten layouts on two cores, predicted, run and graded), sleeping (stages that sleep, on two other cores
# beside them), sends (messages beside computing), gate (every layout against one process, MPI and gloo side by side),
# together (the ten layouts in half a minute, several at once on two cores each: memory is graded, times are rough).
# Everything ends after SECONDS (default 190); what was found until then is in FOLDER, what was printed in printed.txt.
set -u
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd) limit=${2:-190} work=$(mktemp -d)
shift $(($# > 1 ? 2 : 1))
parts=" ${*:-layouts sleeping sends gate} "
export PYTHONPATH=$PWD/src XDG_CACHE_HOME=$work/cache CUDA_VISIBLE_DEVICES= COLUMNS=120 PYTHONUNBUFFERED=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
python=${PYTHON:-python3}
exec > >(tee -a "$out/printed.txt") 2>&1
wants() { [[ $parts == *" $1 "* ]]; }
left() { echo $((limit - SECONDS > 1 ? limit - SECONDS : 1)); }
say() { echo "[$SECONDS s] $*"; }
bounded() { timeout --kill-after=5 "$(left)" "$@"; }

# One processor per core, so that no two of ours share a core's caches and units.
mapfile -t cores < <("$python" -c '
import os, re
for cpu in sorted(os.sched_getaffinity(0)):
    path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    if not os.path.exists(path) or int(re.match(r"\d+", open(path).read())[0]) == cpu:
        print(cpu)')
two=${cores[0]},${cores[1]} others=${cores[2]:-${cores[0]}},${cores[3]:-${cores[1]}}
say "$(nproc) processors, ${#cores[@]} cores: layouts on $two, sleeping stages on $others"

layouts() {
    # Collectives up to 1 MiB: the planner takes latency and bandwidth from 16 B and 1 MiB.
    bounded "$python" -m tilemesh calibrate --quick 2>&1 | grep -E "^(warning|calibrat|[0-9]+ figures)"
    say "calibrated"
    for ranks in 2 4; do
        bounded "$python" -m tilemesh bench collective --fit --ranks $ranks --sizes 16B..1MiB --quick 2>&1 |
            grep -v " ranks: "
        say "fitted $ranks ranks"
    done
    cp "$XDG_CACHE_HOME"/tilemesh/calibration/*.json "$out/calibration.json"
    PYTHON=$python CALIBRATE=no UNTIL=$((limit - SECONDS - 12)) bash benchmarks/plan_layouts.sh "$work/runs" 14 \
        one dp2 tp2 dp2tp2 tp4 pp2 pp2-zbv dp2pp2 dp2-zero1 dp4-zero3 >"$work/layouts.txt" 2>&1
    cp "$work/runs/grades.jsonl" "$out/layouts.jsonl" && tail -n 90 "$work/layouts.txt" || cat "$work/layouts.txt"
    say "layouts graded"
}

sleeping() {
    bounded "$python" benchmarks/sleeping_stages.py --no-peers --transport mpi --repeats 3 --json "$out/sleeping.jsonl"
    bounded "$python" benchmarks/sleeping_stages.py --schedules gpipe,1f1b,interleaved,zb-v --repeats 3 \
        --json "$out/sleeping.jsonl"
    say "sleeping stages done"
}

together() {
    known=benchmarks/results/calibration-xeon-2of16c.json
    here=$("$python" -c 'from tilemesh.measure.machine import this_machine; print(this_machine().id)')
    if grep -q "\"identity\": \"$here\"" $known; then
        mkdir -p "$XDG_CACHE_HOME/tilemesh/calibration" && cp $known "$XDG_CACHE_HOME/tilemesh/calibration/$here.json"
    else
        taskset -c "$two" timeout "$(left)" "$python" -m tilemesh calibrate --quick | grep warning
    fi
    names=(dp4-zero3 tp4 dp2tp2 dp2pp2 pp2-zbv pp2 dp2-zero1 tp2 dp2 one) lanes=$((${#cores[@]} / 2)) pids=()
    for ((lane = 0; lane < lanes; lane++)); do
        mine=()
        for ((place = lane; place < ${#names[@]}; place += lanes)); do mine+=("${names[place]}"); done
        PYTHON=$python CALIBRATE=no UNTIL=$((limit - SECONDS - 14)) taskset -c "${cores[2 * lane]},${cores[2 * lane + 1]}" \
            timeout --kill-after=5 "$(left)" bash benchmarks/plan_layouts.sh "$work/runs$lane" 8 "${mine[@]}" \
            >"$work/lane$lane.txt" 2>&1 &
        pids+=($!)
    done
    wait "${pids[@]}"
    cat "$work"/runs*/grades.jsonl >"$out/layouts.jsonl"
    grep -h -A3 -E "^(step time|peak memory)|rror" "$work"/lane*.txt
    say "layouts graded: $(grep -c '"' "$out/layouts.jsonl")"
}

wants together && together
if wants sleeping; then
    (taskset -pc "$others" $BASHPID >/dev/null && sleeping) &
    beside=$!
fi
if wants layouts; then
    (taskset -pc "$two" $BASHPID >/dev/null && layouts)
fi
wants sleeping && wait $beside
if wants sends && ((SECONDS < limit)); then
    bounded "$python" benchmarks/pipeline_sends.py --transports mpi --repeats 5 --json "$out/sends.jsonl"
    say "sends done"
fi
if wants gate && ((SECONDS < limit)); then
    pids=()
    for transport in mpi torch; do
        bounded "$python" -m tilemesh verify --ranks 8 --transport $transport --json "$out/gate_$transport.jsonl" \
            >"$work/gate_$transport.txt" 2>&1 &
        pids+=($!)
    done
    wait "${pids[@]}"
    grep -h -B1 -A1 -E "FAIL|cases:|tilemesh:" "$work"/gate_*.txt
    wc -l "$out"/gate_*.jsonl
    say "gate done"
fi
rm -rf "$work"
