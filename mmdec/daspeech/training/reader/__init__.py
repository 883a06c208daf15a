"""Training of the graph decoder that reads a CTC head's pieces."""
