"""Training: one folder for each system, and code that all systems share. Running a trained model does not import it."""
