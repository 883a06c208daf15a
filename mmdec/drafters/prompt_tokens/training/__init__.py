"""Trains prompt tokens on the target's own answers."""
