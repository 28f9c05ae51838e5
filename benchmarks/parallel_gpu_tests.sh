#!/bin/sh
# Each GPU test in a process of its own, all at once: compiling is what takes the time, and cores are many.
# Usage: sh benchmarks/parallel_gpu_tests.sh FOLDER_FOR_LOGS
set -u
names=$(python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --collect-only tests/gpu/test_matmul.py | sed -n 's/.*::\(test_.*\)/\1/p')
for name in $names; do
  timeout 240 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --tb=short "tests/gpu/test_matmul.py::$name" \
    > "$1/$name.log" 2>&1 &
done
wait
for name in $names; do
  if grep -q " passed" "$1/$name.log" && ! grep -q "failed\|error" "$1/$name.log"; then echo "ok     $name"; else echo "FAILED $name"; grep -E "^E  |Error" "$1/$name.log" | head -8; tail -3 "$1/$name.log"; fi
done
