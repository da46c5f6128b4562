#!/usr/bin/env bash
# Runs tests/bridge with the wheel of Megatron-Bridge, which lies in .compat/bridge without its dependencies: what they
# are for needs a GPU, and has stand-ins (tests/stand_ins.py).
# Usage: tools/bridge.sh VENV
set -euo pipefail
venv=$1
folder=.compat/bridge-0.6.2
if [ ! -d "$folder" ]; then
  rm -rf "$folder.partial"
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --target "$folder.partial" megatron-bridge==0.6.2
  mv "$folder.partial" "$folder"
fi
PYTHONPATH=$PWD/$folder${PYTHONPATH:+:$PYTHONPATH} "$venv/bin/python" -m pytest tests/bridge
