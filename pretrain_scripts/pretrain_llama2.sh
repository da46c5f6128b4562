#!/usr/bin/env bash
# Pretrain Llama 2 with Megatron's own engine and 4-bit LoCo gradients.
#
#   pretrain_scripts/pretrain_llama2.sh SIZE [section.key=value ...] [--with FILE] [--out DIR] [--resume] [--dry-run]
#
#   SIZE   GPUs (80 GB)   layout          memory per GPU, estimated: state + activations
#   350m     8 = 1 x 8    DP 8             3 + 17 GB   (a LLaMA of that size, not one of Llama 2's)
#   7b      16 = 2 x 8    DP 16           46 + 18 GB
#   13b     32 = 4 x 8    TP 2, DP 16     46 + 14 GB
#   70b     64 = 8 x 8    TP 8, PP 2, DP 4   43 + 11 GB
#
# Data: data/llama2_text_document.bin and .idx (data.path=... for another place), made once in a clone of Megatron-LM, with the
# model's tokenizer in tokenizers/llama2 (megatron.tokenizer_model=...; it is not shipped, its licence is the model's):
#   python tools/preprocess_data.py --input TEXTS.jsonl --output-prefix data/llama2 --append-eod --workers 16 \
#       --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizers/llama2
#
# On several nodes run it on each of them, with one shared --out (or use slurm/ and kubernetes/ beside this file):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node01 pretrain_scripts/pretrain_llama2.sh 7b \
#       --with configs/clusters/torchrun.yaml --out /shared/runs/llama2_7b
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  350m) config=llama_350m ;;
  7b | 13b | 70b) config=llama2_$1 ;;
  *)
    echo "megatron-loco: error: SIZE: '${1:-}' must be one of 350m, 7b, 13b, 70b" >&2
    exit 2
    ;;
esac
shift
PATH=$PATH:$root/.venv/bin
exec megatron-loco train "$root/configs/models/$config.yaml" "$@"
