"""Quality and speed, measured through the calls that people make."""
