"""Targets: each one knows a model whole, and nothing of drafting."""
