"""Training of EAGLE, EAGLE-3, P-EAGLE, MSD, ViSpec and SpecVLM on the target's own answers."""
