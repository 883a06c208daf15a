"""The public calls: one folder per task; tasks do not import each other."""
