"""Networks: speech encoder, decoders, FastSpeech 2, vocoder. A network knows nothing of files or of audio."""
