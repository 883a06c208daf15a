"""Readers of speech, text and picture corpora in the formats in which they are published."""
