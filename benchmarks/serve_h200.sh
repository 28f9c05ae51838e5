#!/usr/bin/env bash
# Serving on one H200, random weights, 1.1 B and 8 B Llama shapes: products and decode steps, 256 requests, prefix
# sharing, online load, `tilemesh serve` of the 8 B model from cold, transformers beside ours; then two cores of the CPU.
# Usage: benchmarks/serve_h200.sh FOLDER [PART ...]
#   parts: products small large start peers cpu    (all: about 330 s; each part has a limit of its own)
#   OPENVINO=FILE: an archive of openvino, openvino_genai, openvino_tokenizers and gguf, for a machine without them.
set -u
out=${1:?the folder for the rows}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
exec > >(tee -a "$out/log.txt") 2>&1
parts=" ${*:-products small large start peers cpu} "

limited() { # SECONDS COMMAND...
  local seconds=$1 begun=$SECONDS
  shift
  echo "== $*"
  timeout "$seconds" "$@"
  echo "== code $?, $((SECONDS - begun)) s"
}

decode() { # SECONDS SHAPE ARGUMENTS...: both shapes' rows come into one file
  local seconds=$1 shape=$2
  shift 2
  limited "$seconds" "$python" benchmarks/serve_decode_h200.py --shapes "$shape" "$@" \
    --json "$scratch/serve_decode_h200.jsonl"
  cat "$scratch/serve_decode_h200.jsonl" >> "$out/serve_decode_h200.jsonl"
  cat "$scratch"/serve_decode_h200-*-online.jsonl >> "$out/serve_online_h200.jsonl"
  rm -f "$scratch"/serve_decode_h200*
}

cpu_row() { # CPUS SECONDS NAME ARGUMENTS...
  local cpus=$1 seconds=$2 name=$3
  shift 3
  OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES='' timeout "$seconds" taskset -c "$cpus" "$python" -m tilemesh bench serve \
    "$@" --predict machine --json "$scratch/cpu-$name.jsonl" > "$scratch/cpu-$name.txt" 2>&1
  echo "== cpus $cpus: bench serve $*: code $?"
  tail -n 12 "$scratch/cpu-$name.txt"
}

plain=--plain
if [[ $parts == *" small "* || $parts == *" large "* ]]; then
  # Kernels that are wrong are not worth timing.
  timeout 70 "$python" -m pytest -q -x tests/gpu/test_serve.py -k "fresh or few_rows or pages_is_within" \
    || plain=--only-plain
fi
if [[ $parts == *" products "* ]]; then
  limited 60 "$python" benchmarks/serve_products_h200.py --json "$out/serve_products_h200.jsonl"
fi
if [[ $parts == *" small "* ]]; then
  decode 90 tinyllama-1.1b "$plain" --profile --prefix --serve --online
fi
if [[ $parts == *" large "* ]]; then
  decode 100 llama-3-8b "$plain" --profile --prefix --serve
fi
if [[ $parts == *" start "* ]]; then
  limited 60 "$python" benchmarks/serve_start_h200.py make "$scratch/model"
  limited 75 "$python" benchmarks/serve_start_h200.py time "$scratch/model" | tee "$out/serve_start_h200.jsonl"
  rm -rf "$scratch/model"
fi
if [[ $parts == *" peers "* ]]; then
  "$python" benchmarks/known_calibration.py || echo "no calibration: the datasheet's figures are the limit"
  limited 80 "$python" -m tilemesh bench serve tinyllama-1.1b --requests 128 --prompt 128 --output 128 --running 128 \
    --step-tokens 2048 --blocks 1 --device cuda --dtype bf16 --predict machine --json "$out/serve_h200_peers.jsonl" \
    --peers transformers-static,transformers-continuous
fi
if [[ $parts == *" cpu "* ]]; then
  if [[ -n ${OPENVINO:-} && -e ${OPENVINO:-} ]]; then
    mkdir "$scratch/openvino" && tar -xf "$OPENVINO" -C "$scratch/openvino"
    export PYTHONPATH=$PYTHONPATH:$scratch/openvino
    "$python" -c "import openvino_genai; print('openvino-genai', openvino_genai.__version__)"
  fi
  lscpu | grep -E "^(Model name|CPU\(s\)|Thread|Core)"
  # One CPU of each core, so that no two threads of a row share one.
  mapfile -t cores < <(lscpu -p=CPU,CORE,SOCKET | grep -v '^#' | sort -t, -u -k2,3 | cut -d, -f1 | sort -n)
  most=transformers-static,openvino-genai
  last=transformers-continuous # by itself: where it takes too long, the other rows are there
  load=(--prompt 16-128 --output 32)
  jobs=(
    "27m-fp32 llama-27m --dtype fp32 --requests 16 --running 16 --blocks 3 --peers $most"
    "27m-bf16 llama-27m --dtype bf16 --requests 16 --running 16 --blocks 3 --peers $most"
    "110m-fp32 llama-110m --dtype fp32 --requests 16 --running 16 --blocks 3 --peers $most"
    "110m-bf16 llama-110m --dtype bf16 --requests 16 --running 16 --blocks 3 --peers $most"
    "27m-fp32-last llama-27m --dtype fp32 --requests 16 --running 16 --blocks 2 --peers $last"
    "27m-bf16-last llama-27m --dtype bf16 --requests 16 --running 16 --blocks 2 --peers $last"
    "27m-fp32-64 llama-27m --dtype fp32 --requests 64 --running 64 --blocks 2 --peers $most"
    "27m-bf16-64 llama-27m --dtype bf16 --requests 64 --running 64 --blocks 2 --peers $most"
  )
  at=0
  for job in "${jobs[@]}"; do
    if ((at + 2 > ${#cores[@]})); then
      wait
      at=0
    fi
    read -ra words <<< "$job"
    cpu_row "${cores[at]},${cores[at + 1]}" 70 "${words[@]}" "${load[@]}" &
    at=$((at + 2))
  done
  wait
  cat "$scratch"/cpu-*.jsonl > "$out/serve_cpu_2c.jsonl"
fi
echo "== $SECONDS s in all"
