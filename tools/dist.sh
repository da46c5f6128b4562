#!/usr/bin/env bash
# Builds the source distribution, and from it a wheel for x86-64 and one for aarch64, into dist/; audits them.
# The wheels hold the compiled CPU kernels: who installs one needs no compiler.
# The aarch64 wheel needs a cross-compiler (Debian: g++-aarch64-linux-gnu); without one a line says that it is left out.
# Usage: tools/dist.sh VENV
set -euo pipefail
PATH=$(realpath "$1")/bin:$PATH
unset PYTHONPATH
rm -rf dist build/dist
mkdir -p build/dist/source
hatchling build -t sdist -d dist >/dev/null
tar -xzf dist/*.tar.gz -C build/dist/source --strip-components=1

for machine in x86_64 aarch64; do
  if [ "$machine" != "$(uname -m)" ] && ! command -v "$machine-linux-gnu-g++" >/dev/null; then
    echo "no wheel for $machine: $machine-linux-gnu-g++ was not found (Debian, Ubuntu: apt install g++-$machine-linux-gnu)"
    continue
  fi
  # From the unpacked source distribution: what it lacks is missed here, not by a user.
  (cd build/dist/source && MEGATRON_LOCO_MACHINE=$machine hatchling build -t wheel -d ../linux >/dev/null)
  # Names the wheel after the oldest glibc that has every symbol it asks for; fails if none has.
  log=build/dist/auditwheel-$machine.log
  if ! auditwheel repair --plat auto --only-plat --wheel-dir dist build/dist/linux/*_"$machine".whl >"$log" 2>&1; then
    cat "$log" >&2
    echo "megatron-loco: error: auditwheel refused the wheel for $machine" >&2
    exit 1
  fi
done
for wheel in dist/*.whl; do
  auditwheel show "$wheel" | tr '\n' ' ' | sed 's/  */ /g; s/$/\n/'
done
ls -l dist
