"""Training of Medusa heads for any Whisper."""
