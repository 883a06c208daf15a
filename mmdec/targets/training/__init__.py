"""Training of masked diffusion models."""
