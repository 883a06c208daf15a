"""EAGLE, EAGLE-3, P-EAGLE, MSD, ViSpec and SpecVLM: drafters that read the target's hidden states and grow trees."""
