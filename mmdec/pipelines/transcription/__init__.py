"""Speech to text by Whisper with speculative decoding: `mmdec.transcribe`."""
