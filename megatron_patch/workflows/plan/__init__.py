"""`megatron-loco plan`: predicts what a recipe gains on a cluster, and which setting to take."""
