"""Training of a small Whisper, whose exported model transformers can load."""
