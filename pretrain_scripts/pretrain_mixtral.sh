#!/usr/bin/env bash
# Pretrain Mixtral with Megatron's own engine and 4-bit LoCo gradients, those of the experts included.
#
#   pretrain_scripts/pretrain_mixtral.sh SIZE [section.key=value ...] [--with FILE] [--out DIR] [--resume] [--dry-run]
#
#   SIZE   GPUs (80 GB)   layout               memory per GPU, estimated: state + activations
#   8x7b    64 = 8 x 8    PP 4, EP 8, DP 16    22 + 34 GB
#
# Data: data/mixtral_text_document.bin and .idx (data.path=... for another place), made once in a clone of Megatron-LM, with the
# model's tokenizer in tokenizers/mixtral (megatron.tokenizer_model=...; it is not shipped, its licence is the model's):
#   python tools/preprocess_data.py --input TEXTS.jsonl --output-prefix data/mixtral --append-eod --workers 16 \
#       --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizers/mixtral
#
# Run it on each node, with one shared --out (or use slurm/ and kubernetes/ beside this file):
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node01 pretrain_scripts/pretrain_mixtral.sh 8x7b \
#       --with configs/clusters/torchrun.yaml --out /shared/runs/mixtral_8x7b
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  8x7b) config=mixtral_$1 ;;
  *)
    echo "megatron-loco: error: SIZE: '${1:-}' must be 8x7b" >&2
    exit 2
    ;;
esac
shift
PATH=$PATH:$root/.venv/bin
exec megatron-loco train "$root/configs/models/$config.yaml" "$@"
