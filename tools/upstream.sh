#!/usr/bin/env bash
# Runs Megatron-LM's own tests of its gradient exchange twice, as they are and with compression attached as method none, and
# compares what every test says. On GPUs, one rank each; without one on 2 CPU ranks.
# Usage: tools/upstream.sh CHECKOUT_OF_MEGATRON_LM [files of its tests, instead of those in tests/unit_tests/distributed ...]
#   the checkout: git clone --depth 1 --branch core_v0.19.0 the repository of Megatron-LM
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
checkout=${1:?usage: tools/upstream.sh CHECKOUT_OF_MEGATRON_LM}
shift
[ -d "$checkout/tests/unit_tests" ] || {
  echo "megatron-loco: error: $checkout has no tests/unit_tests: it must be a checkout of Megatron-LM" >&2
  exit 2
}
ranks=$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)
[ "$ranks" -gt 0 ] || ranks=2
out=$(mktemp -d)
cd "$checkout"
if [ $# -eq 0 ]; then # those of DistributedDataParallel; the FSDP ones do not pass it
  set -- $(ls tests/unit_tests/distributed/test_*.py | grep -v fully_sharded)
fi
export PYTHONPATH=$root:$root/tools:$PWD${PYTHONPATH:+:$PYTHONPATH}
export TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1
[ "$ranks" -gt 2 ] || export GLOO_SOCKET_IFNAME=lo
for how in stock attached; do
  echo "$how, $ranks ranks"
  [ $how = stock ] || export MEGATRON_LOCO_ENABLE=1
  # What fails without us may fail with us, too.
  # A file at a time: their process groups are never destroyed, and each has threads of its own.
  for file in "$@"; do
    MEGATRON_LOCO_RESULTS=$out/$how timeout 600 "$root/.venv/bin/torchrun" --nproc-per-node="$ranks" --standalone \
      -m pytest -p upstream_plugin -p no:cacheprovider -q -W ignore "$file" >>"$out/$how.log" 2>&1 || true
  done
  cat "$out/$how".[0-9]* 2>/dev/null | sort | uniq -c >"$out/$how" || true
  awk '{ count[$2] += $1 } END { for (word in count) printf "  %d %s", count[word], word; print "" }' "$out/$how"
done
grep -q passed "$out/stock" || {
  echo "megatron-loco: error: no test passed without compression either: $out/stock.log says why" >&2
  exit 1
}
diff "$out/stock" "$out/attached" || {
  echo "megatron-loco: error: some tests say something else with compression attached: $out/attached.log" >&2
  exit 1
}
echo "the same with compression attached"
