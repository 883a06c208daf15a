"""Training: one folder for each system, and what all recipes share. Running a trained model needs none of it."""
