#!/usr/bin/env bash
# Creates the virtual environment VENV (a path, absolute or from here) with the locked dependencies and this package, editable;
# or, if packages are named, with these at their locked versions alone.
# Python 3.12 is taken from PYTHON, the PATH, or a pyenv installation.
# Usage: tools/setup.sh VENV [PACKAGE ...]
set -euo pipefail
venv=$1
shift

is_python_312() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3 "$(dirname "$(dirname "$(command -v pyenv || echo /nowhere/bin/x)")")"/versions/3.12*/bin/python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && is_python_312 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

if ! python=$(find_python); then
  echo "megatron-loco: error: no Python 3.12 found (tried PYTHON='${PYTHON:-}', the PATH, pyenv): install it (apt install python3.12 python3.12-venv, or pyenv install 3.12) or name it: make setup PYTHON=/path/to/python3.12" >&2
  exit 2
fi

uv_version=$(sed -n 's/^uv==//p' requirements.lock)
if ! is_python_312 "$venv/bin/python"; then
  echo "creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version" 2>/dev/null ||
  "$venv/bin/python" -m pip install --disable-pip-version-check "uv==$uv_version"
VIRTUAL_ENV=$(realpath --no-symlinks --canonicalize-missing "$venv")
export VIRTUAL_ENV UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
if [ $# -gt 0 ]; then
  "$venv/bin/uv" pip install --quiet --constraint requirements.lock "$@"
  exit
fi
echo "installing the locked dependencies (torch with CUDA: about 5 GB the first time)"
# `sync` makes the environment equal to the lock, so that nothing installed by hand is relied upon.
"$venv/bin/uv" pip sync --quiet --compile-bytecode requirements.lock
"$venv/bin/uv" pip install --quiet --no-deps --no-build-isolation --editable .
