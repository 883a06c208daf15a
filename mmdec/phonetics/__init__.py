"""Phones to readable English: lexicon, n-gram model, approximate matching, beam search."""
