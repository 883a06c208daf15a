"""Whisper and transcription: encoder, decoder and target; `transcribe.py` is the call, `live.py` the microphone."""
