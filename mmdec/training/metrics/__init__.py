"""Scores of texts: error rates, BLEU, and an independent speech recogniser for ASR-BLEU."""
