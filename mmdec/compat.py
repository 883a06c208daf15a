"""The versions of transformers that mmdec supports, and what differs between them."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import version

from mmdec.errors import MmdecError

# versions of transformers: the oldest that mmdec supports, and the first that it does not support yet
MIN_TRANSFORMERS, FIRST_UNSUPPORTED_TRANSFORMERS = (5, 23), (5, 25)


@lru_cache
def transformers_release() -> tuple[int, ...]:
    """Return the first two numbers of the version of transformers that is installed."""
    return tuple(int(number) for number in re.findall(r"\d+", version("transformers"))[:2])


def check_transformers() -> None:
    """Raise MmdecError unless mmdec works with the installed transformers, whose internals it reads."""
    if not MIN_TRANSFORMERS <= transformers_release() < FIRST_UNSUPPORTED_TRANSFORMERS:
        oldest, refused = (
            ".".join(map(str, numbers)) for numbers in (MIN_TRANSFORMERS, FIRST_UNSUPPORTED_TRANSFORMERS)
        )
        raise MmdecError(
            f"`transformers` must be at least {oldest} and older than {refused}, but is {version('transformers')}. "
            f"Run `pip install 'transformers>={oldest},<{refused}'`."
        )


# argument name of the key-value cache in transformers' models; transformers renamed it in version 5.24
CACHE_ARGUMENT = "cache" if transformers_release() >= (5, 24) else "past_key_values"
