#!/usr/bin/env bash
# The graph room on a GPU: a training step of GPT-2 and Llama blocks eager, by Inductor and by our backend, with and
# without CUDA graphs, and the kernels of a step of each; the models of transformers beside eager; branches at once;
# the tests; the first step of each compiler in a process of its own. Rows go into the folder that is given, model by
# model. Nothing has to be installed: run from the repository's root. Models compile side by side and are timed one
# after the other; caches begin empty.
# About 3 minutes on an H200 with 16 cores. PARTS chooses: first, blocks, pictures, models, unrolled, studies, tests.
# TOTAL: seconds after which whatever still runs is ended; rows that were written stay.
# Rehearsal without a GPU: DEVICE=cpu BLOCKS="gpt2-blocks llama-blocks" BLOCK_SIZE=tiny MODELS=lstm SIZE=tiny AT_ONCE=1 benchmarks/graph_h200.sh /tmp/out
set -u
out=${1:?give a folder for the rows}
parts=${PARTS:-first blocks pictures tests models studies}
device=${DEVICE:-cuda}
dtype=${DTYPE:-$([ "$device" = cuda ] && echo bfloat16 || echo float32)}
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:-src} PYTHONUNBUFFERED=1
mkdir -p "$out"
ends=$(($(date +%s) + ${TOTAL:-3600}))
left() { # LIMIT: the seconds that a command may run
    local rest=$((ends - $(date +%s)))
    echo $((rest < 1 ? 1 : rest < $1 ? rest : $1))
}
fresh=$(mktemp -d)
export XDG_CACHE_HOME=$fresh TORCHINDUCTOR_CACHE_DIR=$fresh/inductor TRITON_CACHE_DIR=$fresh/triton
# Limits come from this machine's calibration: the committed one where it is this machine's.
"$python" benchmarks/known_calibration.py >"$out/calibration.txt" 2>&1
step() { # MODEL SIZE PEERS [--profile [NAME]]: one model; its rows and its last lines are kept
    local name=${5:-$1}
    timeout -k 2 "$(left "${LIMIT:-100}")" "$python" benchmarks/graph_step.py "$1" "$out" --size "$2" --device "$device" --dtype "$dtype" --name "$name" \
        --peers "$3" --seconds "${SECONDS_EACH:-3}" ${4:-} >"$out/$name.txt" 2>&1 || echo "$name: exit code $?" >>"$out/$name.txt"
    tail -n 30 "$out/$name.txt"
}
export -f step left
export out device dtype python ends
# Beside the default, which records what waits for the host: all as CUDA graphs, or none.
recorded=$([ "$device" = cuda ] && echo ,recorded)
launched=$([ "$device" = cuda ] && echo ,launched)
for part in $parts; do
    began=$SECONDS
    case $part in
    first) # both models at once, by one compiler after the other; caches begin empty for each
        for way in ours compile; do
            for model in ${BLOCKS:-gpt2-blocks llama-blocks}; do
                caches=$(mktemp -d -p "$fresh")
                XDG_CACHE_HOME=$caches TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton \
                    timeout -k 2 "$(left 60)" "$python" benchmarks/graph_step.py "$model" "$out" --size "${BLOCK_SIZE:-$model}" --device "$device" \
                    --dtype "$dtype" --first $way ${STAGES:+--stages} 2>&1 | tail -n 3 &
            done
            wait
        done
        ;;
    pictures) # alone: whoever is to be timed waits until nobody compiles
        step resnet "${PICTURES:-pictures}" "compile,eager$launched" --profile pictures
        ;;
    unrolled) # a GPU's LSTM is unrolled by torch: compiling it takes minutes
        LIMIT=${UNROLLED:-400} step lstm "${SIZE:-small}" "eager$launched"
        ;;
    blocks)
        for model in ${BLOCKS:-gpt2-blocks llama-blocks}; do
            step "$model" "${BLOCK_SIZE:-$model}" "compile,eager$recorded" --profile &
        done
        wait
        ;;
    models)
        printf '%s\n' ${MODELS:-mixtral t5 gpt2 llama bert mistral qwen2 gemma2 opt gpt-neox vit resnet} |
            SECONDS_EACH=${SECONDS_EACH_MODEL:-1.5} xargs -P "${AT_ONCE:-5}" -I{} bash -c "step {} ${SIZE:-small} eager$launched"
        ;;
    studies)
        timeout -k 2 "$(left 60)" "$python" -m tilemesh bench graph --study branches,host,memory --device "$device" --seconds 2 \
            --json "$out/studies.jsonl" >"$out/studies.txt" 2>&1
        tail -n 40 "$out/studies.txt"
        ;;
    tests) # beside the models: nothing is timed meanwhile
        (flock -s "$out/timing.lock" timeout -k 2 "$(left "${LIMIT:-100}")" "$python" -m pytest -q tests/gpu/test_graph_gpu.py -p no:cacheprovider >"$out/tests.txt" 2>&1
            tail -n 15 "$out/tests.txt") &
        ;;
    esac
    echo "== $part: $((SECONDS - began)) s"
done
wait
rm -rf "$fresh"
