#!/bin/bash
# 4-bit codes times one token on one H200: what reading alone takes, kernels in question, decoding an 8 B shape, and the
# tests of few-bit products. Run from the repository's root; $OUT: where readings go. At most 110 seconds, each part with
# a limit of its own; all keep what they have.
set -u
export PYTHONPATH=src
out=${OUT:-.}
python=${PYTHON:-python3}
say() { tee -a "$out/compress_variants.txt"; }
timeout ${PRODUCTS:-38} $python benchmarks/int4_variants.py floor products --out "$out" 2>&1 | say
timeout ${DECODE:-42} $python benchmarks/int4_variants.py decode --out "$out" 2>&1 | say
timeout ${TESTS:-30} $python -m pytest -q -x -p no:cacheprovider tests/gpu/test_lowbit.py \
  tests/gpu/test_serve.py::test_weights_of_4_bits_answer_with_graphs_as_without 2>&1 | tail -25 | say
