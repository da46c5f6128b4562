#!/usr/bin/env bash
# Runs the seam's contract and behaviour tests on the oldest and the middle supported megatron-core, or on a checkout.
# Each lies in .compat/ without its dependencies, which the environment has already; PYTHONPATH puts one of them before
# the locked release, on which `make test` runs the same tests.
# Usage: [MEGATRON_LM=CHECKOUT] tools/compat.sh VENV [pytest's arguments, instead of the tests that run by default ...]
#   MEGATRON_LM   a checkout of Megatron-LM: tests run on it, then its own tests of distributed training with and
#                 without compression attached (tools/upstream.sh)
set -euo pipefail
venv=$1
shift
# test_parallelism.py passes too, but takes longer than all others together: name it to run it.
[ $# -gt 0 ] || set -- tests/compat tests/with_megatron --ignore=tests/with_megatron/test_parallelism.py

get() { # FOLDER WHAT: an interrupted installation must not look like a finished one
  [ ! -d "$1" ] || return 0
  echo "getting megatron-core of $2"
  rm -rf "$1.partial"
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --compile-bytecode --target "$1.partial" "$2"
  mv "$1.partial" "$1"
}

if [ -n "${MEGATRON_LM:-}" ]; then
  commit=$(git -C "$MEGATRON_LM" rev-parse --short=10 HEAD)
  get ".compat/$commit" "$MEGATRON_LM"
  folders=$commit
else
  folders="0.17.1 0.18.2"
  for version in $folders; do get ".compat/$version" "megatron-core==$version"; done
fi

failed=""
for name in $folders; do
  version=$(sed -n 's/^Version: //p' .compat/"$name"/megatron_core-*.dist-info/METADATA)
  echo "megatron-core $version"
  PYTHONPATH=$PWD/.compat/$name${PYTHONPATH:+:$PYTHONPATH} EXPECTED_MEGATRON_CORE=${version%%+*} \
    "$venv/bin/python" -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder "$@" || failed="$failed $version"
done
if [ -n "${MEGATRON_LM:-}" ]; then
  bash "$(dirname "${BASH_SOURCE[0]}")/upstream.sh" "$MEGATRON_LM" || failed="$failed (its own tests)"
fi
if [ -n "$failed" ]; then
  echo "megatron-loco: error: the tests failed on megatron-core$failed" >&2
  exit 1
fi
