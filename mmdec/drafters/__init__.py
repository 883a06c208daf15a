"""Drafters: objects that propose trees of tokens.

A drafter is a file or, with its network, checkpoint and training, a folder. It never accepts tokens and never imports a
target.
"""
