"""Many files: lists, shards, tables and Ray."""
