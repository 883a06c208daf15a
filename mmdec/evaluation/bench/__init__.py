"""Benchmarks. Each times methods against a baseline, and writes a report in one common format that describes the
machine, too."""
