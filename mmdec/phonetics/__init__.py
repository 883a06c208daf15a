"""Pieces of words, n-gram language models, pronunciation lexicons, and the pronunciation of any English text."""
