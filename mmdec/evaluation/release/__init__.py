"""Promotion: compares a newly trained model with the shipped one, and replaces the shipped one if the new one is
better."""
