"""Training of DASpeech: encoder and graph decoder, acoustic decoder, vocoder."""
