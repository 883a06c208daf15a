"""Finds models by shipped name, path or Hugging Face id, and writes their folders atomically.

Weights are safetensors; only published drafters may be pickles.
"""
