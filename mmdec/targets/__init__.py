"""Targets: adapters that score drafts, one for each kind of model. They do not depend on how drafts are made."""
