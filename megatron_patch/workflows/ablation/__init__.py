"""`megatron-loco ablate`: compares many settings of a base recipe over several seeds."""
