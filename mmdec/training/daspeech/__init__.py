"""Training of the speech translator DASpeech (speech to phones to speech)."""
