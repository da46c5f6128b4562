"""1-bit Adam inside Megatron's optimizers: its warm-up, its step and its exchange of momentum."""
