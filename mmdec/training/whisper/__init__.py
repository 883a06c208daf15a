"""Training of the small Whisper."""
