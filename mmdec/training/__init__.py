"""Training: one folder for each system, and code that all systems share. To use a trained model, none of it is
imported."""
