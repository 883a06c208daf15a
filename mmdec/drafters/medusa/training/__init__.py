"""Training of Medusa heads for Whisper and for language models."""
