"""Training: one folder for each kind of model or drafter, and code that all of them share. To use a trained model, none
of it is imported."""
