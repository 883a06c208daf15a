"""Training: what all recipes share, and one folder a system. Running a trained model needs nothing of it."""
