"""`megatron-loco report`: makes one self-contained HTML page of runs' folders."""
