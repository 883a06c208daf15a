"""Checks of what people give (arguments, files, weights); processes that end with the one that started them."""
