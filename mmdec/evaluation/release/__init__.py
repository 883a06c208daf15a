"""A candidate beside the shipped weights: promoted where it measures better."""
