"""Training of CTC heads that draft."""
