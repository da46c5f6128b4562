"""Benchmarks and studies that developers run from the root of a clone; they are not part of the wheel."""
