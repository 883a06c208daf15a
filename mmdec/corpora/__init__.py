"""Readers of the on-disk layouts of real corpora: paths and text, no sound yet."""
