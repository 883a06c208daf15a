"""Training of the small vision-language model: LLaVA's architecture, on computer-drawn scenes."""
