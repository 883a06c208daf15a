"""Benchmarks: timings of methods in comparison, in one report format, with the machine's description."""
