"""What only developers run, from the root of a clone; no wheel has it, and the package imports none of it."""
