"""A picture on the page, with the visual tokens that a drafter kept drawn over it. HTML and SVG come out."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from html import escape

import numpy as np

from mmdec.images import to_pil

SIDE = 640  # pixels of the longer side, at most, as it is sent to the browser
TOKEN = "A visual token is a small square of the picture, as the model sees it."
_CHOSEN = "Its gate, which reads the question, chose to"
COMPRESSED = {  # how a drafter made the picture smaller, in words
    "prune": f"{_CHOSEN} keep the squares that count most.",
    "pool": f"{_CHOSEN} average neighbours.",
    "conv": f"{_CHOSEN} fold neighbours into one (a convolution).",
    "resampler": f"{_CHOSEN} sum the picture up in a few learned vectors (a resampler).",
    "text-only": f"{_CHOSEN} draft from the text alone.",
    "queries": "A few learned queries sum them up.",
    "latents": "Learned vectors (latents) sum them up.",
}


def data_address(pixels: np.ndarray) -> str:
    """Pixels (H, W, 3) uint8 as an address that holds the picture itself."""
    picture = to_pil(pixels)
    picture.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    picture.save(written, format="PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode("ascii")


def side_of(tokens: int) -> int | None:
    """The grid's side where an image's visual tokens fill a square, as they do for LLaVA; else None."""
    side = math.isqrt(tokens)
    return side if tokens and side * side == tokens else None


def kept_svg(kept: Sequence[float]) -> str:
    """A veil over what the drafter dropped: one cell for each visual token, darker the less of it is kept."""
    side = side_of(len(kept))
    if side is None:
        return ""
    most = max(*kept, 1e-6)
    cells = "".join(
        f'<rect x="{index % side}" y="{index // side}" width="1" height="1" '
        f'style="fill-opacity:{0.75 * (1 - value / most):.2f}"><title>visual token {index + 1}: '
        f"{100 * value / most:.0f} % of the most</title></rect>"
        for index, value in enumerate(kept)
    )
    return (
        f'<svg class="mm-kept" aria-hidden="true" viewBox="0 0 {side} {side}" preserveAspectRatio="none">{cells}</svg>'
    )


def kept_sentence(compressor: str | None, kept: Sequence[float] | None, drafter: str) -> str:
    """What the drafter read of the picture, in words."""
    if kept is None:
        return f"{drafter} reads every visual token. {TOKEN}"
    whole = sum(value > 0.0 for value in kept)
    how = f" {COMPRESSED.get(compressor, f'Its gate chose the compressor “{compressor}”.')}" if compressor else ""
    drawn = ""
    if side_of(len(kept)) and min(kept) < max(kept):
        drawn = "Darker squares are those it left out." if whole < len(kept) else "Darker squares count for less."
    return f"{drafter} reads {whole} of {len(kept)} visual tokens.{how} {drawn}".strip()


def picture_html(pixels: np.ndarray, name: str, kept: Sequence[float] | None = None, caption: str = "") -> str:
    """The picture; with `kept` its veil, with a caption a line below it."""
    height, width = pixels.shape[:2]
    veil = "" if kept is None else kept_svg(kept)
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure class="mm-figure"><div class="mm-frame"><img src="{data_address(pixels)}" '
        f'alt="{escape(name)}, {width} by {height} pixels"/>{veil}</div>{below}</figure>'
    )
