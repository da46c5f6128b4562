#!/usr/bin/env bash
# Pretrain Llama 3 with Megatron's own engine and 4-bit LoCo gradients.
#
#   pretrain_scripts/pretrain_llama3.sh SIZE [section.key=value ...] [--with FILE] [--out DIR] [--resume] [--dry-run]
#
#   SIZE   GPUs (80 GB)    layout             memory per GPU, estimated: state + activations
#   8b      16 = 2 x 8     TP 2, DP 8         31 + 22 GB
#   70b    128 = 16 x 8    TP 8, PP 4, DP 4   23 + 22 GB
#
# Data: data/llama3_text_document.bin and .idx (data.path=... for another place), made once in a clone of Megatron-LM, with the
# model's tokenizer in tokenizers/llama3 (megatron.tokenizer_model=...; it is not shipped, its licence is the model's):
#   python tools/preprocess_data.py --input TEXTS.jsonl --output-prefix data/llama3 --append-eod --workers 16 \
#       --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizers/llama3
#
# On several nodes run it on each of them, with one shared --out (or use slurm/ and kubernetes/ beside this file):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node01 pretrain_scripts/pretrain_llama3.sh 8b \
#       --with configs/clusters/torchrun.yaml --out /shared/runs/llama3_8b
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  8b | 70b) config=llama3_$1 ;;
  *)
    echo "megatron-loco: error: SIZE: '${1:-}' must be one of 8b, 70b" >&2
    exit 2
    ;;
esac
shift
PATH=$PATH:$root/.venv/bin
exec megatron-loco train "$root/configs/models/$config.yaml" "$@"
