"""Training of Medusa heads, drafters for speculative decoding, on any Whisper."""
