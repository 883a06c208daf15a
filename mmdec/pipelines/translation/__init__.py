"""Translation of French speech into English speech: `mmdec.translate_speech`."""
