#!/usr/bin/env bash
# Installs the wheel of dist/ into a new virtual environment and uses it as a newcomer does: in an empty folder and
# home, with nothing of this repository and no compiler in PATH. First with torch, megatron-core and numpy alone,
# then with the extras.
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
install_extras() {
  VIRTUAL_ENV=$place/venv UV_LINK_MODE=${UV_LINK_MODE:-hardlink} "$uv" pip install --quiet \
    --constraint "$lock" "megatron-loco[recipes,report] @ file://$wheel"
}
lock=$(realpath requirements.lock)

cd "$place/folder"
newcomer() { env -i HOME="$place/home" PATH="$place/venv/bin" OMP_NUM_THREADS=1 "$@"; }
newcomer megatron-loco doctor | tee doctor.txt
grep -Eq '^cpu kernels +[a-z]' doctor.txt || { echo "megatron-loco: error: the wheel's kernels are not used" >&2; exit 1; }
fail() { echo "megatron-loco: error: $*" >&2; exit 1; }

# The core: a script of one's own trains with the exact weight gather; what needs an extra says which.
for extra in rich omegaconf yaml matplotlib scipy tokenizers tensorboard einops transformers; do
  ! newcomer python -c "import $extra" 2>/dev/null || fail "$extra is there without an extra"
done
shipped=$(newcomer python -c 'import pathlib, megatron_patch as m; print(pathlib.Path(m.__file__).parent / "_shipped/pretrain_scripts/own_loop.py")')
cp "$shipped" own_loop.py
newcomer torchrun --nproc-per-node 2 -m megatron_patch.launch own_loop.py --compression-device cpu 2>stderr.txt | tee losses.txt || {
  cat stderr.txt >&2
  exit 1
}
grep -q 'step 30: loco, 4 bits: ' losses.txt || fail "own_loop.py printed no report"
for command in train compare ablate plan prepare-data report; do
  status=0
  newcomer megatron-loco $command >stdout.txt 2>stderr.txt || status=$?
  [ $status = 2 ] && [ "$(wc -l <stderr.txt)" = 1 ] && grep -q "^megatron-loco: error: $command needs .*: pip install 'megatron-loco\[" stderr.txt ||
    fail "$command without its extra ended with status $status: $(cat stderr.txt)"
done

install_extras
newcomer megatron-loco compare configs/models/llama_tiny_bf16.yaml --methods none,loco \
  megatron.train_iters=6 megatron.lr_warmup_iters=1 megatron.eval_iters=1 --out runs/smoke
echo "the wheel works: $(basename "$wheel")"
