"""Training of CTC heads on a frozen speech encoder."""
