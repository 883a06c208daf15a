"""Networks: speech encoder, decoders, FastSpeech 2, vocoder, draft networks. They do not depend on files or audio
formats."""
