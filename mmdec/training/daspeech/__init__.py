"""Training of DASpeech."""
