"""Training of the small vision-language model: LLaVA's architecture, on synthetic pictures that are drawn by a
program."""
