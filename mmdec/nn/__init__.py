"""Layers that several networks share: the speech encoder, Transformer decoder layers, and int8 linear layers."""
