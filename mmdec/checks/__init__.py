"""Checks of user input (arguments, files, weights); child processes that end with their parent."""
