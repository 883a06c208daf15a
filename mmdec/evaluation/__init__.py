"""Scores, benchmarks and promotion of models, all through the public calls of `mmdec`."""
