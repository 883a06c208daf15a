"""The reader of pieces and its decoders: text first, then what a head hears."""
