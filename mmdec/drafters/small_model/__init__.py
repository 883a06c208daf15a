"""A smaller model as a drafter, with the target's vocabulary or with another one."""
