"""Medusa: heads on the target's last hidden state, linear or with a decoder layer of their own."""
