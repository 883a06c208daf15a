"""Drafters: objects that propose token trees, one file each. A drafter never accepts tokens and never imports a
target."""
