"""`megatron-loco plan`: what a recipe would gain on a cluster, and which setting to take. Nothing is run."""
