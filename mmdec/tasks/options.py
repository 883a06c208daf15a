"""Limits of the options that all public calls have."""

MAX_BATCH = 4096  # maximum batch size
