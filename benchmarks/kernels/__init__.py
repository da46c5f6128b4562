"""Measures the CPU kernels on one core, and the host's time for a launch."""
