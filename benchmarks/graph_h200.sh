#!/usr/bin/env bash
# The graph room on a GPU: a training step eager, by Inductor and by our backend, with and without CUDA graphs, and the
# generated Triton kernels beside torch's operators. Writes JSON rows into the folder that is given.
# Rehearsal without a GPU: DEVICE=cpu SIZE=tiny MODELS=lstm benchmarks/graph_h200.sh /tmp/out
set -u
out=${1:?give a folder for the rows}
device=${DEVICE:-cuda}
size=${SIZE:-gpt2}
dtype=${DTYPE:-$([ "$device" = cuda ] && echo bfloat16 || echo float32)}
python=${PYTHON:-python}
mkdir -p "$out"
if [ "$device" = cuda ]; then
    timeout 200 "$python" -m pytest -q tests/gpu/test_graph_gpu.py -p no:cacheprovider 2>&1 | tail -n 15 | tee "$out/tests.txt"
fi
for model in ${MODELS:-gpt2 llama bert resnet}; do
    timeout "${LIMIT:-150}" "$python" -m tilemesh bench graph "$model" --size "$size" --device "$device" \
        --dtype "$dtype" --peers eager,compile --repeats 20 --seconds 15 --json "$out/$model.jsonl" 2>&1 | tail -n 25
done
