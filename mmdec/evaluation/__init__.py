"""Scores of the systems: quality of translation, transcription and description on corpora."""
