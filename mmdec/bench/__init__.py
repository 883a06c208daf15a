"""Benchmarks: two ways in turn, outputs compared first, one table and one JSON format."""
