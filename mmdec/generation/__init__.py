"""The doors to the core for transformers' own models, and what lies between the two."""
