#!/usr/bin/env bash
# Pretrain Qwen3's mixture of experts with Megatron's own engine and 4-bit LoCo gradients, the experts' included.
#
#   pretrain_scripts/pretrain_qwen3_moe.sh SIZE [section.key=value ...] [--with FILE] [--out DIR] [--resume] [--dry-run]
#
#   SIZE      GPUs (80 GB)   layout               memory per GPU, estimated: state + activations
#   30b_a3b    32 = 4 x 8    PP 2, EP 8, DP 16    29 + 27 GB
#
# Data: data/qwen3_text_document.bin and .idx (data.path=... for another place), made once in a clone of Megatron-LM, with the
# model's tokenizer in tokenizers/qwen3 (megatron.tokenizer_model=...; it is not shipped):
#   python tools/preprocess_data.py --input TEXTS.jsonl --output-prefix data/qwen3 --append-eod --workers 16 \
#       --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizers/qwen3
#
# Run it on each node, with one shared --out (or use slurm/ and kubernetes/ beside this file):
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node01 pretrain_scripts/pretrain_qwen3_moe.sh 30b_a3b \
#       --with configs/clusters/torchrun.yaml --out /shared/runs/qwen3_30b_a3b
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  30b_a3b) config=qwen3_$1 ;;
  *)
    echo "megatron-loco: error: SIZE: '${1:-}' must be 30b_a3b" >&2
    exit 2
    ;;
esac
shift
PATH=$PATH:$root/.venv/bin
exec megatron-loco train "$root/configs/models/$config.yaml" "$@"
