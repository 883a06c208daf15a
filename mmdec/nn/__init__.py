"""Networks: speech encoder, decoders, FastSpeech 2, vocoder, draft networks. They know no files or sound formats."""
