"""A short call of `mmdec.transcribe`: half a second of a buzz, at most four tokens."""

from __future__ import annotations

from typing import Any

import mmdec
from tests.conftest import RATE, buzz


def transcribe(audio: Any = None, **options: Any) -> Any:
    given = {"sample_rate": RATE, "max_new_tokens": 4, "drafter": None, **options}
    return mmdec.transcribe(buzz(0.5) if audio is None else audio, **given)
