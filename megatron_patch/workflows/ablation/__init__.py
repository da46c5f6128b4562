"""`megatron-loco ablate`: a base recipe, many settings, several seeds; what the differences are worth."""
