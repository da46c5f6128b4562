"""Saves error states in Megatron's checkpoints and loads them."""
