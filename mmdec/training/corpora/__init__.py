"""Readers of corpora as they are published."""
