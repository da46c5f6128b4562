"""`megatron-loco report`: runs' folders to one HTML page that needs nothing else."""
