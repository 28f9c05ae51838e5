#!/bin/bash
# Compression on one H200. Run from the repository's root; rows go to $OUT (default: the current folder).
#
#   benchmarks/compress_h200.sh speed      products, decoding an 8 B shape, pruned shapes: about four minutes
#   benchmarks/compress_h200.sh quality    gpt2-124m trained for five minutes, then every recipe's loss: LIMIT seconds
#                                          (RUN: where the trained run is kept, or lies already; PARTS: judge table)
#
# Needs Python 3.12, torch 2.11 and triton 3.6; nothing has to be installed. PEERS_PATH: where torchao lies, where it is not
# installed. Every part has a limit, and keeps what it has.
set -u
out=${OUT:-.}
export PYTHONPATH=src${PEERS_PATH:+:$PEERS_PATH}
python=${PYTHON:-python3}
$python benchmarks/known_calibration.py || $python -m tilemesh calibrate --quick >"$out/calibrate.txt" 2>&1

if [ "${1:-}" = speed ]; then
  for part in products shapes dense decode pruned; do
    timeout ${LIMIT:-110} $python benchmarks/compress_h200.py $part --out "$out" 2>&1 |
      tee -a "$out/compress_speed.txt"
  done
elif [ "${1:-}" = quality ]; then
  left() { echo $((${LIMIT:-580} - SECONDS)); }
  folder=$(mktemp -d)
  run=${RUN:-$folder/gpt2-124m}
  parts=${PARTS:-judge table}
  lean=checkpoint.every=0,sample.tokens=0
  [ -d "$run" ] || timeout 400 $python -m tilemesh train ${SHAPE:-gpt2-124m} --mesh dp=1 --transport torch --out "$run" \
    --max-time ${TRAIN:-302s} --set train.steps=${STEPS:-4400},evaluate.every=500,$lean 2>&1 |
    tail -30 | tee -a "$out/compress_quality.txt"
  echo "trained after $SECONDS s" | tee -a "$out/compress_quality.txt"
  losses="$python benchmarks/compress_losses.py --device ${DEVICE:-cuda} --sequences ${SEQUENCES:-512}"

  if [[ $parts == *judge* ]]; then
    # What targets are judged by: three choices of calibration text side by side, of losses alone. One thread each:
    # threads of five processes that wait for each other would take the cores from all.
    export OMP_NUM_THREADS=1
    by_text=int3-g64-awq,int3-g64-gptq,int2-g64-awq,int2-g64-gptq
    timeout $(left) $losses "$run" --recipes int3-g64,int2-g64,$by_text,int3-g64-clip,int3-g64-mixed,int2-g64-clip \
      --peers torchao --seed 0 --json "$out/compress_gpt2_124m_seed0_h200.jsonl" >>"$out/compress_quality.txt" 2>&1 &
    jobs="$!"
    for seed in 1 2; do
      timeout $(left) $losses "$run" --recipes $by_text,int3-g64-clip,int3-g64-mixed,int2-g64-clip --peers torchao \
        --seed $seed --json "$out/compress_gpt2_124m_seed${seed}_h200.jsonl" >>"$out/compress_quality.txt" 2>&1 &
      jobs="$jobs $!"
    done
    # Quantisation-aware training, then as many steps without, each then rounded: one at a time, for they take 55 GiB.
    (
      $python -m tilemesh export "$run" "$folder/plain"
      for kind in aware further; do
        with=$([ $kind = aware ] && echo "--recipe int3-g64")
        timeout ${AWARE:-120} $python -m tilemesh train ${SHAPE:-gpt2-124m} --init "$folder/plain" $with --mesh dp=1 \
          --transport torch --out "$folder/$kind" \
          --set train.steps=${AWARE_STEPS:-100},optimizer.lr=1e-4,optimizer.warmup=10,train.compile=false,$lean &&
          timeout $(left) $losses "$folder/$kind" --recipes int3-g64 --name gpt2-124m-$kind \
            --json "$out/compress_gpt2_124m_${kind}_h200.jsonl"
      done
    ) >"$folder/aware.txt" 2>&1 &
    wait $jobs $!
    tail -n 60 "$folder/aware.txt" >>"$out/compress_quality.txt"
    grep -E "^seed|plain|Error" "$out/compress_quality.txt"
    echo "judged after $SECONDS s" | tee -a "$out/compress_quality.txt"
  fi

  if [[ $parts == *table* ]]; then
    # The table, with bytes and times, alone on the GPU.
    unset OMP_NUM_THREADS
    table=int8,int8-a8,fp8,int4-g64,int4-g64-awq,int4-g64-gptq,nf4-g64,mlp-25,layers-25,2:4,fp8-a8,rank-50,heads-25
    timeout $(left) $python -m tilemesh bench compress "$run" --device ${DEVICE:-cuda} --dtype bf16 --recipes $table \
      --sequences ${SEQUENCES:-512} --calibrate 64 --seconds 0.3 --json "$out/compress_gpt2_124m_h200.jsonl" 2>&1 |
      tee -a "$out/compress_quality.txt"
  fi
  rm -rf "$folder"
else
  echo "compress_h200.sh: expected speed or quality" >&2
  exit 2
fi
