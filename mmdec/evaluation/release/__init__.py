"""Compares a new model with the shipped one, and promotes it if it measures better."""
