"""Training of FLASH on the target's own answers."""
