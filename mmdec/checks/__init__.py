"""What people give is checked before it is believed: arguments, files, weights."""
