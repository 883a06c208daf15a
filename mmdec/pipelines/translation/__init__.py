"""French speech in, English speech out: `mmdec.translate_speech`."""
