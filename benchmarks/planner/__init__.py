"""Compares the predictions of `megatron-loco plan` with measured cells of the network benchmark."""
