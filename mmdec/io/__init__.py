"""Sound and pictures: reading, checking, writing."""
