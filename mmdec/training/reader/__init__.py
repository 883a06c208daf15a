"""Training of the text translator inside a speech translator: first on exact text, then on a CTC head's output."""
