"""`megatron-loco prepare-data`: makes Megatron data sets of text."""
