"""Training of drafters that read their target's features: EAGLE, MSD, SpecVLM, ViSpec and FLASH, for any target."""
