"""The places where Megatron's calls are replaced: gradient exchange, weight gather, optimizer step."""
