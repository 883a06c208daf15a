"""Training of EAGLE, EAGLE-3, P-EAGLE, MSD, ViSpec, SpecVLM and FLASH on the target's own answers."""
