"""Training of DASpeech: linguistic half, acoustic model, vocoder, export."""
