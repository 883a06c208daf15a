"""Decoding with drafts for models of transformers: the calls, and the bridge between their `generate` and the core."""
