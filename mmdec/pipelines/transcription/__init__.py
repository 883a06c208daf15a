"""Speech to text with a Whisper that drafts: `mmdec.transcribe`."""
