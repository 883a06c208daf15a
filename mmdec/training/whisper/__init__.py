"""Trains a small Whisper, and exports it in the format that the library transformers loads."""
