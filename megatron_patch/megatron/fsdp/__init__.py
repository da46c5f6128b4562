"""Megatron's own fully sharded data parallelisms: `--use-torch-fsdp2` and Megatron-FSDP."""
