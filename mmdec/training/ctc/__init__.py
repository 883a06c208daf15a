"""CTC heads on a frozen encoder."""
