"""Converts phones to English text: pronunciation lexicon, n-gram language model, approximate matching, beam search."""
