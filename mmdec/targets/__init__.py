"""Targets: each adapts one kind of model to score drafts. They do not depend on how drafts are made."""
