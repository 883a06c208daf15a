"""Scores and benchmarks of models, and the examination of drafters."""
