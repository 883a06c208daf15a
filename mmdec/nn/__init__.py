"""Neural networks: speech encoders, decoders, FastSpeech 2, vocoders, draft networks. None of them reads files or audio
formats."""
