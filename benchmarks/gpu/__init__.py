"""What one machine with GPUs can tell about this package in eight minutes, without a network."""
