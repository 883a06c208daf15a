"""DASpeech and speech-to-speech translation through a directed acyclic graph; `translate.py` is the call."""
