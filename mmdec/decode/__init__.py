"""The decoding core: paths through a lattice, words from phones. Decoding knows nothing of networks."""
