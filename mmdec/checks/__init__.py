"""Checks of user input: arguments, devices, files, weights."""
