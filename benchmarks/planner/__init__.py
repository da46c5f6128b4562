"""How good `megatron-loco plan` is: measured cells of the network benchmark beside its predictions."""
