"""Loads language, vision-language and audio language models of transformers, and drafters for them."""
