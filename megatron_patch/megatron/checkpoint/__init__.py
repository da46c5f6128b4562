"""The error states in Megatron's checkpoints."""
