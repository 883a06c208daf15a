"""Targets: adapters that score drafts with one kind of model. They do not depend on how drafts are made."""
