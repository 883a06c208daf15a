"""The lowest floor: the errors that every other file raises. It knows nothing of tensors.

An error names the argument, the rule, the value and the remedy:
"`sample_rate` must be at least 8000 Hz, but is 4000. Resample the audio first."
"""


class MmdecError(Exception):
    """Every error that mmdec raises on purpose. The message is meant for the person who made the call."""


class InputError(MmdecError, ValueError):
    """An argument or a file breaks a rule. Nothing was computed and nothing was written."""
