"""FLASH: a drafter with a compressed picture, which drafts several tokens per step."""
