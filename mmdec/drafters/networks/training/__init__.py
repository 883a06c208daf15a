"""Training of draft networks on the target's own answers."""
