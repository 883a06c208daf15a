"""The decoding core: draft, one pass of the target, verify, commit. It knows nothing of networks."""
