"""Training of heads on the target's own answers."""
