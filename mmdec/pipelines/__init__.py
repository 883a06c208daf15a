"""What people call: one folder a task; the tasks do not see each other."""
