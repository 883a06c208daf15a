"""Training of DFlash on the target's own answers."""
