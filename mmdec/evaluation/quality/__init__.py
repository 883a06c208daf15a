"""How good the outputs are, through the calls that people make."""
