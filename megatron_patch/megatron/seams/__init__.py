"""How Megatron's own calls reach the exchanges: gradients, the optimizer's step."""
