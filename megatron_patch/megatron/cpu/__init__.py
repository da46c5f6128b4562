"""Runs Megatron's engine on CPU over gloo, for trials, tests and CI."""
