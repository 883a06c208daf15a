"""The public calls, with one folder for each task. Tasks do not import each other."""
