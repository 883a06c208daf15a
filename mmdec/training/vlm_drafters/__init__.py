"""Training of drafters that read their target's hidden states: EAGLE, EAGLE-3, MSD, SpecVLM, ViSpec, FLASH, DFlash."""
