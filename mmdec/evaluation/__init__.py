"""Scores and benchmarks of models, calibration of their confidence, and promotion: replacing a shipped model by a
better one."""
