#!/usr/bin/env bash
# Serving on one H200, random weights, 1.1 B and 8 B Llama shapes: decode steps, 256 requests, prefix
# sharing, online load, `tilemesh serve` of the 8 B model from cold, transformers beside ours; and two cores of the CPU.
# Usage: benchmarks/serve_h200.sh FOLDER [PART ...]
#   parts: tests small large loads online start peers, one after the other; cpu after them, or beside: the same
#   while they run, on cores of its own; packed: weights laid out for the CPU and not, on eight cores, beside as well.
#   All but beside and packed: about 400 s; each part has a limit of its own, and WITHIN seconds are the limit of all.
#   DETAIL= leaves out single sequences and profiles.
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
parts=" ${*:-tests small large loads online start peers cpu} "

within=${WITHIN:-3600}
detail=${DETAIL---one --profile}

limited() { # SECONDS COMMAND...
  local seconds=$1 begun=$SECONDS left=$((within - SECONDS))
  shift
  if ((left < 10)); then
    echo "== left out, $left s are left: $*"
    return
  fi
  seconds=$((seconds < left ? seconds : left))
  echo "== $*"
  timeout "$seconds" "$@"
  echo "== code $?, $((SECONDS - begun)) s, $SECONDS s since the beginning"
}

decode() { # SECONDS SHAPE ARGUMENTS...: rows of all shapes come into one file
  local seconds=$1 shape=$2
  shift 2
  limited "$seconds" "$python" benchmarks/serve_decode_h200.py --shapes "$shape" "$@" \
    --json "$scratch/serve_decode_h200.jsonl"
  cat "$scratch/serve_decode_h200.jsonl" >> "$out/serve_decode_h200.jsonl"
  cat "$scratch"/serve_decode_h200-*-online.jsonl >> "$out/serve_online_h200.jsonl" 2> /dev/null
  rm -f "$scratch"/serve_decode_h200*
}

cpu_row() { # CPUS SECONDS NAME ARGUMENTS...
  local cpus=$1 seconds=$2 name=$3
  shift 3
  OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES='' timeout "$seconds" taskset -c "$cpus" "$python" -m tilemesh bench serve \
    "$@" --predict machine --json "$scratch/cpu-$name.jsonl" > "$scratch/cpu-$name.txt" 2>&1
  echo "== cpus $cpus: bench serve $*: code $?"
  tail -n 9 "$scratch/cpu-$name.txt" | cut -c 1-200
  cat "$scratch/cpu-$name.jsonl" >> "$out/serve_cpu_2c.jsonl"
}

packed_row() { # CPUS DTYPE: with and without in turn; the tests of it first where they are asked for
  OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES='' timeout 40 taskset -c "$1" "$python" benchmarks/serve_packed_cpu.py \
    --dtype "$2" --json "$scratch/packed-$2.jsonl" > "$scratch/packed-$2.txt" 2>&1
  echo "== cpus $1: packed weights, $2: code $?"
  cut -c 1-300 "$scratch/packed-$2.txt"
  cat "$scratch/packed-$2.jsonl" >> "$out/serve_packed_cpu.jsonl"
}

packed_tests() { # CPUS
  CUDA_VISIBLE_DEVICES='' timeout 40 taskset -c "$1" "$python" -m pytest -q -p no:cacheprovider tests/cpu/test_packed.py \
    > "$scratch/packed-tests.txt" 2>&1
  echo "== cpus $1: tests of packed weights: code $?"
  tail -n 5 "$scratch/packed-tests.txt"
}

packed_rows() { # two cores each
  local most=transformers-static,openvino-genai load="--requests 16 --running 16 --prompt 16-128 --output 32 --blocks 3"
  local first="${cores[1]},${cores[0]}" second="${cores[3]},${cores[2]}"
  local third="${cores[5]},${cores[4]}" fourth="${cores[7]},${cores[6]}"
  # shellcheck disable=SC2086
  {
    { packed_row "$first" fp32; cpu_row "$first" 70 110m-fp32 llama-110m --dtype fp32 $load --peers $most; } &
    { packed_row "$second" bf16; cpu_row "$second" 70 110m-bf16 llama-110m --dtype bf16 $load --peers $most; } &
    { cpu_row "$third" 60 27m-fp32 llama-27m --dtype fp32 $load --peers $most; packed_tests "$third"; } &
    cpu_row "$fourth" 60 27m-bf16 llama-27m --dtype bf16 $load --peers $most &
  }
  wait
}

# One CPU of each core, so that no two threads of a row share one; rows take them from the end.
mapfile -t cores < <(lscpu -p=CPU,CORE,SOCKET | grep -v '^#' | sort -t, -u -k2,3 | cut -d, -f1 | sort -nr)

cpu_rows() { # SECONDS MOST: rows of two cores each, so many at the same time
  local most=transformers-static,openvino-genai
  local last=transformers-continuous # by itself: where it takes too long, the other rows are there
  local sixteen="--requests 16 --running 16 --prompt 16-128 --output 32" many="--requests 64 --running 64"
  local jobs=(
    "27m-fp32 llama-27m --dtype fp32 $sixteen --blocks 3 --peers $most"
    "27m-bf16 llama-27m --dtype bf16 $sixteen --blocks 3 --peers $most"
    "110m-fp32 llama-110m --dtype fp32 $sixteen --blocks 3 --peers $most"
    "110m-bf16 llama-110m --dtype bf16 $sixteen --blocks 3 --peers $most"
    "27m-fp32-last llama-27m --dtype fp32 $sixteen --blocks 2 --peers $last"
    "27m-bf16-last llama-27m --dtype bf16 $sixteen --blocks 2 --peers $last"
    "27m-fp32-64 llama-27m --dtype fp32 $many --prompt 16-128 --output 32 --blocks 2 --peers $most"
    "27m-bf16-64 llama-27m --dtype bf16 $many --prompt 16-128 --output 32 --blocks 2 --peers $most"
  )
  local at=0 job words
  for job in "${jobs[@]}"; do
    if ((at + 2 > 2 * $2)); then
      [[ $3 == once ]] && break
      wait
      at=0
    fi
    read -ra words <<< "$job"
    cpu_row "${cores[at + 1]},${cores[at]}" "$1" "${words[@]}" &
    at=$((at + 2))
  done
  wait
}

if [[ $parts == *" cpu "* || $parts == *" beside "* || $parts == *" packed "* ]]; then
  if [[ -n ${OPENVINO:-} && -e ${OPENVINO:-} ]]; then
    mkdir "$scratch/openvino" && tar -xf "$OPENVINO" -C "$scratch/openvino"
    export PYTHONPATH=$PYTHONPATH:$scratch/openvino
  fi
  lscpu | grep -E "^(Model name|CPU\(s\)|Thread|Core)"
fi
beside=
keep_to() { # CPUS: this process and what it starts leaves these, and their cores, to others
  local taken free
  taken=$(IFS='|'; echo "$*")
  free=$(lscpu -p=CPU,CORE | grep -v '^#' | awk -F, -v taken="^($taken)$" '
    { cpu[NR] = $1; core[NR] = $2; if ($1 ~ taken) busy[$2] = 1 }
    END { for (at = 1; at <= NR; at++) if (!(core[at] in busy)) line = line "," cpu[at]; print substr(line, 2) }')
  echo "== rows of the CPU beside; the rest runs on $free"
  taskset -cp "$free" $$
}
if [[ $parts == *" packed "* ]] && ((${#cores[@]} >= 10)); then
  packed_rows &
  beside=$!
  keep_to "${cores[@]:0:8}"
fi
if [[ $parts == *" beside "* ]]; then
  rows=$(((${#cores[@]} - 2) / 2))
  rows=$((rows > 6 ? 6 : rows))
  cpu_rows 58 "$rows" once &
  beside=$!
  keep_to "${cores[@]:0:2*rows}"
fi
if [[ $parts == *" tests "* ]]; then
  limited 120 "$python" -m pytest -q -x tests/gpu/test_serve.py
fi
if [[ $parts == *" small "* ]]; then
  # shellcheck disable=SC2086
  decode 75 tinyllama-1.1b $detail --prefix --serve
fi
if [[ $parts == *" large "* ]]; then
  # shellcheck disable=SC2086
  decode 45 llama-3-8b $detail ${detail:+--prepare}
fi
if [[ $parts == *" loads "* ]]; then
  decode 60 llama-3-8b --prefix --serve
fi
if [[ $parts == *" online "* ]]; then
  decode 45 tinyllama-1.1b --online
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
  cpu_rows 70 $((${#cores[@]} / 2)) all
fi
[[ -n $beside ]] && wait "$beside"
echo "== $SECONDS s in all"
