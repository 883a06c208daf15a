"""Scores and benchmarks of models, and calibration of their confidence."""
