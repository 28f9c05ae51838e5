#!/usr/bin/env bash
# The graph room on a GPU: tests; a training step of GPT-2 and Llama blocks eager, by Inductor and by our backend, with
# and without CUDA graphs; the models of transformers beside eager; branches at once. Writes JSON rows into the folder
# that is given, as it goes. Nothing has to be installed: run from the repository's root with PYTHONPATH=src.
# Compiling takes most of the time: about 60 s for the blocks, 15 s for each model of transformers.
# Rehearsal without a GPU: DEVICE=cpu BLOCKS=lstm BLOCK_SIZE=tiny MODELS=lstm SIZE=tiny benchmarks/graph_h200.sh /tmp/out
set -u
out=${1:?give a folder for the rows}
device=${DEVICE:-cuda}
dtype=${DTYPE:-$([ "$device" = cuda ] && echo bfloat16 || echo float32)}
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:-src}
mkdir -p "$out"
# Limits come from this machine's calibration: the committed one where it is this machine's.
"$python" benchmarks/known_calibration.py >"$out/calibration.txt" 2>&1
bench() { # MODEL SIZE PEERS
    timeout "${LIMIT:-150}" "$python" -m tilemesh bench graph "$1" --size "$2" --device "$device" --dtype "$dtype" \
        --peers "$3" --repeats 15 --seconds 4 --json "$out/$1.jsonl" 2>&1 | tail -n 25 | tee "$out/$1.txt"
}
graphs=$([ "$device" = cuda ] && echo ,recorded)
for model in ${BLOCKS:-gpt2-blocks llama-blocks}; do
    bench "$model" "${BLOCK_SIZE:-$model}" "compile,eager$graphs"
done
for model in ${MODELS:-gpt2 llama bert t5 mistral qwen2 gemma2 opt gpt-neox vit resnet lstm mixtral}; do
    bench "$model" "${SIZE:-small}" eager
done
timeout 100 "$python" -m tilemesh bench graph --study branches,host,memory --device "$device" --seconds 3 \
    --json "$out/studies.jsonl" 2>&1 | tail -n 40 | tee "$out/studies.txt"
if [ "$device" = cuda ]; then
    timeout 200 "$python" -m pytest -q tests/gpu/test_graph_gpu.py -p no:cacheprovider 2>&1 | tail -n 15 | tee "$out/tests.txt"
fi
