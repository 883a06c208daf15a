"""CTC: a head on a speech encoder's states drafts the whole transcript."""
