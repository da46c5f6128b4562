"""`megatron-loco bench`."""
