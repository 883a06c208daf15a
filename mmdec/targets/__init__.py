"""Targets: each one scores drafts with one kind of model, and knows nothing of how drafts come about."""
