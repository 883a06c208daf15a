"""A recording as a picture: its waveform, and words under it at their times. SVG comes out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from mmdec.pipelines.transcription.transcript import Word

PER_SECOND, WIDE = 90, 260  # pixels of a second: at least, and at most where a short recording has room
ROOM = 1100  # pixels
WAVE, LINE = 70, 24  # heights, pixels
LETTER = 7.6  # pixels, of a word's width
WIDEST = 8000  # pixels


def columns(samples: np.ndarray, count: int) -> np.ndarray:
    """Samples (T,) -> the loudest of each of `count` stretches, (count,) in [0, 1]."""
    if not len(samples):
        return np.zeros(count)
    loud = np.array([np.abs(part).max(initial=0.0) for part in np.array_split(samples, count)])
    return loud / max(float(loud.max()), 1e-6)


def rows(words: Sequence[Word], scale: float) -> list[int]:
    """The line of each word, the first in which it overlaps no word before it. scale: pixels of a second."""
    ends: list[float] = []
    chosen: list[int] = []
    for word in words:
        start = word.start * scale
        end = start + max(len(word.text.strip()) * LETTER + 8, (word.end - word.start) * scale)
        line = next((number for number, taken in enumerate(ends) if taken <= start), len(ends))
        if line == len(ends):
            ends.append(end)
        else:
            ends[line] = end
        chosen.append(line)
    return chosen


def waveform_html(samples: np.ndarray, rate: int, words: Sequence[Word]) -> str:
    """Samples (T,) in [-1, 1] at `rate` Hz, with their words."""
    seconds = len(samples) / rate
    seconds_or_some = max(seconds, 0.1)
    scale = min(max(PER_SECOND, min(WIDE, ROOM / seconds_or_some)), WIDEST / seconds_or_some)
    width = max(seconds * scale, 60.0)
    lines = rows(words, scale)
    height = WAVE + LINE * (max(lines, default=-1) + 1) + 22
    bars = "".join(
        f"M{3 * index + 1.5:.1f} {WAVE / 2 * (1 - value):.1f}V{WAVE / 2 * (1 + value) + 0.5:.1f}"
        for index, value in enumerate(columns(samples, int(width // 3)).tolist())
    )
    ticks = "".join(
        f'<text class="mm-tick" x="{second * scale:.1f}" y="{height - 4}">{second} s</text>'
        for second in range(int(seconds) + 1)
        if scale >= 40 or second % 5 == 0
    )
    labels = "".join(word_svg(word, scale, WAVE + LINE * line) for word, line in zip(words, lines, strict=True))
    spoken = ", ".join(f"{word.text.strip()} at {word.start:.1f} s" for word in words)
    return (
        '<section class="mm-wave" aria-label="Words at their times"><h3>Words at their times</h3>'
        '<div class="mm-scroll" tabindex="0" role="region" aria-label="Waveform with its words, scrolls sideways">'
        f'<svg role="img" aria-label="{escape(f"Waveform of {seconds:.1f} seconds. {spoken}")}" '
        f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}">'
        f'<path class="mm-sound" d="{bars}"/>{labels}{ticks}</svg></div></section>'
    )


def word_svg(word: Word, scale: float, y: float) -> str:
    """One word: a line as long as it lasts, and its text."""
    x, length = word.start * scale, max((word.end - word.start) * scale, 2.0)
    return (
        f'<g class="mm-word"><title>{escape(word.text.strip())}: {word.start:.2f} to {word.end:.2f} seconds</title>'
        f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="3" rx="1.5"/>'
        f'<text x="{x:.1f}" y="{y + 19}">{escape(word.text.strip())}</text></g>'
    )
