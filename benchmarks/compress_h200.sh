#!/bin/bash
# Compression on one H200. Run from the repository's root; rows go to $OUT (default: the current folder).
#
#   benchmarks/compress_h200.sh speed      products, decoding an 8 B shape, pruned shapes: about four minutes
#   benchmarks/compress_h200.sh quality    gpt2-124m trained for five minutes, then every recipe's loss: about eight
#
# Needs Python 3.12, torch 2.11 and triton 3.6; nothing has to be installed. Every part has a limit, and keeps what it has.
set -u
out=${OUT:-.}
export PYTHONPATH=src
python=${PYTHON:-python3}
$python benchmarks/known_calibration.py || $python -m tilemesh calibrate --quick >"$out/calibrate.txt" 2>&1

if [ "${1:-}" = speed ]; then
  for part in products shapes dense decode pruned; do
    timeout ${LIMIT:-110} $python benchmarks/compress_h200.py $part --out "$out" 2>&1 |
      tee -a "$out/compress_speed.txt"
  done
elif [ "${1:-}" = quality ]; then
  run=$(mktemp -d)/gpt2-124m
  timeout 400 $python -m tilemesh train gpt2-124m --mesh dp=1 --transport torch --out "$run" --max-time ${TRAIN:-310s} \
    --set train.steps=${STEPS:-4400},checkpoint.every=0,evaluate.every=500,sample.tokens=0 2>&1 |
    tail -40 | tee -a "$out/compress_quality.txt"
  # What targets are judged by first, other seeds of it next, then the table.
  judged=int2-g64,int2-g64-gptq,int2-g64-awq,int2-g64-clip,int3-g64,int3-g64-gptq,int3-g64-awq,int3-g64-mixed
  timeout 150 $python -m tilemesh bench compress "$run" --device cuda --dtype bf16 --recipes $judged \
    --sequences ${SEQUENCES:-512} --calibrate 64 --seconds 0.6 --json "$out/compress_gpt2_124m_judged_h200.jsonl" 2>&1 |
    tee -a "$out/compress_quality.txt"
  timeout 60 $python -m tilemesh bench compress "$run" --device cuda --dtype bf16 --seed 1 --peers none \
    --recipes int2-g64-gptq,int2-g64-awq,int2-g64-clip --sequences ${SEQUENCES:-512} --calibrate 64 --seconds 0.1 \
    --json "$out/compress_gpt2_124m_seed1_h200.jsonl" 2>&1 | tee -a "$out/compress_quality.txt"
  table=int8,int8-a8,fp8,fp8-a8,int4-g64,int4-g64-gptq,int4-g128,nf4-g64,fixed16,mlp-25,heads-25,layers-25,2:4
  table=$table,unstructured-50,rank-50
  timeout 120 $python -m tilemesh bench compress "$run" --device cuda --dtype bf16 --recipes $table \
    --sequences ${SEQUENCES:-512} --calibrate 64 --seconds 0.6 --json "$out/compress_gpt2_124m_h200.jsonl" 2>&1 |
    tee -a "$out/compress_quality.txt"
  rm -rf "$run"
else
  echo "compress_h200.sh: expected speed or quality" >&2
  exit 2
fi
