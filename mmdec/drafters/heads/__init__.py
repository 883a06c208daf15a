"""Heads on the target's last hidden state that remember the tokens drafted so far."""
