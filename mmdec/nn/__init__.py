"""Networks: speech encoder, decoders, FastSpeech 2, vocoder, draft networks. None reads files or sound formats."""
