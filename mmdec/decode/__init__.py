"""The decoding core: draft, run the target once, verify, commit. It does not depend on any network."""
