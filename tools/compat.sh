#!/usr/bin/env bash
# Runs the seam's contract and behaviour tests on the oldest and the middle supported megatron-core.
# The wheels lie in .compat/VERSION without their dependencies, which the environment has already; PYTHONPATH
# puts one of them before the locked release, on which `make test` runs the same tests.
# Usage: tools/compat.sh VENV [pytest's arguments, instead of the tests that run by default ...]
set -euo pipefail
venv=$1
shift
versions="0.17.1 0.18.2"
# test_parallelism.py passes too, but takes longer than all others together: name it to run it.
[ $# -gt 0 ] || set -- tests/compat tests/integration --ignore=tests/integration/test_parallelism.py

for version in $versions; do
  folder=.compat/$version
  if [ ! -d "$folder" ]; then
    echo "getting megatron-core $version"
    rm -rf "$folder.partial"
    # An interrupted installation must not look like a finished one.
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --compile-bytecode \
      --target "$folder.partial" "megatron-core==$version"
    mv "$folder.partial" "$folder"
  fi
done

failed=""
for version in $versions; do
  echo "megatron-core $version"
  PYTHONPATH=$PWD/.compat/$version${PYTHONPATH:+:$PYTHONPATH} EXPECTED_MEGATRON_CORE=$version \
    "$venv/bin/python" -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder "$@" || failed="$failed $version"
done
if [ -n "${MEGATRON_LM:-}" ]; then # a checkout of Megatron-LM: its own tests, with and without compression attached
  bash "$(dirname "${BASH_SOURCE[0]}")/upstream.sh" "$MEGATRON_LM"
fi
if [ -n "$failed" ]; then
  echo "megatron-loco: error: the tests failed on megatron-core$failed" >&2
  exit 1
fi
