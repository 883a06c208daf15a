"""Training of the text translator inside the speech translator: first on text, then on a CTC head's output."""
