"""Speculative decoding for models of transformers: the calls, and the bridge between `generate` and the decoding
core."""
