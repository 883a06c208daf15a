"""Prompt tokens (PPD, PaSS): trained inputs in the target's own pass, whose outputs are the next draft."""
