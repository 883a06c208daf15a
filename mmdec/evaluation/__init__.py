"""Benchmarks: what is timed is what people call."""
