"""Phone alignments as text: "pau:0.224 w:0.262 eh:0.325" names each phone and the second at which it ENDS."""

from __future__ import annotations

import math

from mmdec.phonetics.lexicon import spoken
from mmdec.types import InputError


def parse_alignment(text: str) -> list[tuple[str, float]]:
    """ "pau:0.224 w:0.262" -> [("pau", 0.224), ("w", 0.262)]. Raises InputError if an end is no finite number or lies
    before the end of the phone before it, and for an empty text."""
    phones = []
    last = 0.0
    for item in text.split():
        phone, _, end = item.rpartition(":")
        try:
            second = float(end)
        except ValueError:
            second = math.nan
        if not phone or not last <= second < math.inf:  # NaN fails both comparisons
            raise InputError(
                f"`alignment` must list phone:end with ends in rising seconds, but has {item!r} after {last:g}. "
                "Write the file again."
            )
        last = second
        phones.append((phone, second))
    if not phones:
        raise InputError("`alignment` must hold at least one phone, but is empty. Leave the row out.")
    return phones


def phone_names(text: str) -> list[str]:
    """The phones of an alignment without their times, and without the pauses at both ends. Times are not checked."""
    names = [item.rpartition(":")[0] for item in text.split()]
    return names[spoken(names)]
