"""Scores of outputs, made through the public calls."""
