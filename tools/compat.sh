#!/usr/bin/env bash
# Runs the seam's contract and behaviour tests on the oldest and the middle supported megatron-core, each with a torch of its
# time (and that torch's Triton), or on a checkout of Megatron-LM with the locked torch. The former's environments lie in
# the user's cache, by a digest of what they hold: all clones of one machine share them.
# Usage: [MEGATRON_LM=CHECKOUT] tools/compat.sh VENV [pytest's arguments, instead of the tests that run by default ...]
#   MEGATRON_LM   a checkout of Megatron-LM: tests run on it, then its own tests of distributed training with and
#                 without compression attached (tools/upstream.sh)
set -euo pipefail
venv=$1
shift
# test_parallelism.py passes too, but takes longer than all others together: name it to run it.
megatron=(tests/compat tests/with_megatron --ignore=tests/with_megatron/test_parallelism.py)
failed=""

run() { # NAME PYTHON EXPECTED_MEGATRON_CORE TESTS...
  local name=$1 python=$2 core=$3
  shift 3
  echo "$name"
  EXPECTED_MEGATRON_CORE=$core "$python" -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder "$@" || failed="$failed, $name"
}

cache=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-loco

environment() { # CORE TORCH NUMPY: sets `folder`. An interrupted installation must not look like a finished one.
  local packages rest digest
  packages="megatron-core==$1 torch==$2 numpy==$3
    pytest pytest-xdist hypothesis accelerate einops emerging-optimizers omegaconf pyyaml rich scipy tensorboard tokenizers"
  # All but torch, and what comes with it, is of the lock.
  rest=$(grep -vE '^(torch|triton|nvidia-|cuda-|numpy|megatron-core|networkx|sympy|setuptools|fsspec)' requirements.lock)
  digest=$(printf '%s\n' "$packages" "$rest" "$("$venv/bin/python" -V)" | sha256sum | cut -c1-12)
  folder=$cache/$1-torch$2-$digest
  mkdir -p "$cache"
  (
    flock 9 # Another clone may be installing it.
    if [ -d "$folder" ]; then
      touch "$folder"
      exit
    fi
    echo "installing megatron-core $1 with torch $2 (4 GB the first time)"
    rm -rf "$folder.partial"
    find "$cache" -maxdepth 1 -name "$1-torch$2-*" -mtime +30 -exec rm -rf {} + # No clone has used it for a month.
    "$venv/bin/uv" venv --quiet --relocatable --python "$venv/bin/python" "$folder.partial"
    printf '%s\n' "$rest" >"$folder.partial/rest.txt"
    # shellcheck disable=SC2086
    VIRTUAL_ENV=$folder.partial UV_LINK_MODE=${UV_LINK_MODE:-hardlink} "$venv/bin/uv" pip install --quiet --compile-bytecode \
      --constraint "$folder.partial/rest.txt" $packages
    mv "$folder.partial" "$folder"
  ) 9>"$cache/lock"
}

if [ -n "${MEGATRON_LM:-}" ]; then
  commit=$(git -C "$MEGATRON_LM" rev-parse --short=10 HEAD)
  if [ ! -d ".compat/$commit" ]; then
    rm -rf ".compat/$commit.partial"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --compile-bytecode --target ".compat/$commit.partial" "$MEGATRON_LM"
    mv ".compat/$commit.partial" ".compat/$commit"
  fi
  version=$(sed -n 's/^Version: //p' .compat/"$commit"/megatron_core-*.dist-info/METADATA)
  [ $# -gt 0 ] || set -- "${megatron[@]}"
  PYTHONPATH=$PWD/.compat/$commit${PYTHONPATH:+:$PYTHONPATH} run "megatron-core $version" "$venv/bin/python" "${version%%+*}" "$@"
  bash "$(dirname "${BASH_SOURCE[0]}")/upstream.sh" "$MEGATRON_LM" || failed="$failed, Megatron-LM's own tests"
else
  pair() { # CORE TORCH NUMPY TESTS OF PYTORCH...
    local name="megatron-core $1, torch $2" folder core=$1
    environment "$1" "$2" "$3"
    shift 3
    [ ${#given[@]} -eq 0 ] || set -- "${given[@]}"
    [ ${#given[@]} -gt 0 ] || set -- "${megatron[@]}" "$@"
    PYTHONPATH=$PWD run "$name" "$folder/bin/python" "$core" "$@"
  }
  given=("$@")
  pair 0.17.1 2.8.0 2.3.5 tests/pytorch/test_ddp.py tests/test_releases.py
  pair 0.18.2 2.11.0 2.3.5 tests/pytorch tests/test_releases.py --ignore=tests/pytorch/test_torch_scripts.py
fi
if [ -n "$failed" ]; then
  echo "megatron-loco: error: tests failed: ${failed#, }" >&2
  exit 1
fi
