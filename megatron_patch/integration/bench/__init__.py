"""What `bench network` trains: Megatron's and PyTorch's data-parallel training, timed."""
