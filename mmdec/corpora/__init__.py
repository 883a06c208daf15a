"""Readers of speech corpora on disk: paths and text. No sound is read."""
