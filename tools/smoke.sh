#!/usr/bin/env bash
# Installs the wheel of dist/ into a new virtual environment and uses it as a newcomer does: in an empty folder and
# home, with nothing of this repository and no compiler in PATH.
# Usage: tools/smoke.sh VENV, whose uv and locked versions are taken
set -euo pipefail
uv=$(realpath "$1")/bin/uv
python=$(realpath "$1/bin/python")
wheel=$(realpath dist/*_"$(uname -m)".whl)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/home" "$place/folder"

"$uv" venv --quiet --python "$python" "$place/venv"
VIRTUAL_ENV=$place/venv UV_LINK_MODE=${UV_LINK_MODE:-hardlink} "$uv" pip install --quiet --constraint requirements.lock "$wheel"

cd "$place/folder"
newcomer() { env -i HOME="$place/home" PATH="$place/venv/bin" OMP_NUM_THREADS=1 "$@"; }
newcomer megatron-loco doctor | tee doctor.txt
grep -Eq '^cpu kernels +[a-z]' doctor.txt || { echo "megatron-loco: error: the wheel's kernels are not used" >&2; exit 1; }
newcomer megatron-loco compare configs/models/llama_tiny_bf16.yaml --methods none,loco \
  megatron.train_iters=6 megatron.lr_warmup_iters=1 megatron.eval_iters=1 --out runs/smoke
shipped=$(newcomer python -c 'from megatron_patch.workflows.run.recipes import shipped; print(shipped("pretrain_scripts/own_loop.py"))')
cp "$shipped" own_loop.py
newcomer torchrun --nproc-per-node 2 -m megatron_patch.launch own_loop.py --compression-device cpu 2>stderr.txt | tee losses.txt || {
  cat stderr.txt >&2
  exit 1
}
grep -q 'step 30: loco, 4 bits: ' losses.txt || { echo "megatron-loco: error: own_loop.py printed no report" >&2; exit 1; }
echo "the wheel works: $(basename "$wheel")"
