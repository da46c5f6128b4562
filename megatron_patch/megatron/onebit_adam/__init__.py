"""1-bit Adam inside Megatron's optimizers: warm-up, step, momentum."""
