#!/usr/bin/env bash
# Runs tests/frameworks with the wheels of verl and ms-swift, which lie in .compat/ without their dependencies: what
# is imported of those has stand-ins (tests/stand_ins.py).
# Usage: tools/frameworks.sh VENV
set -euo pipefail
venv=$1
folder=.compat/frameworks-verl-0.9.1-swift-4.6.0
if [ ! -d "$folder" ]; then
  rm -rf "$folder.partial"
  install=("$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps)
  "${install[@]}" --target "$folder.partial/verl" verl==0.9.1
  "${install[@]}" --target "$folder.partial/swift" ms-swift==4.6.0
  mv "$folder.partial" "$folder"
fi
FRAMEWORKS=$PWD/$folder "$venv/bin/python" -m pytest tests/frameworks
