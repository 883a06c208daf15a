"""Speculative decoding: draft, one pass of the target, verify, commit. `loop.py` is the whole idea; read it first."""
