"""Text to Megatron data sets."""
