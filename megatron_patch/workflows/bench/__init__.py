"""`megatron-loco bench`: measures kernels and links."""
