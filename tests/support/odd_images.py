"""Odd picture files by number: the same number gives the same file.

Each is a picture in one of PIL's formats and modes, of odd sides, perhaps turned, transparent or animated, under a
right or a wrong suffix, then perhaps cut, flipped, spliced, or its header changed. Some are no pictures at all.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.odd_bytes import CHANGES, PLACES, place, put

COMMON = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
FORMATS = (*COMMON, *COMMON, "PPM", "ICO", "EPS", "PDF", "TGA", "JPEG2000")
MODES = ("RGB", "RGB", "RGB", "RGB", "RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F", "YCbCr", "LAB", "HSV")
SIDES = (1, 2, 3, 7, 16, 33, 64, 100, 257)
SUFFIXES = ("png", "jpg", "webp", "gif", "bmp", "tiff", "txt", "PNG", "")
EXACT = ("PNG", "BMP", "TIFF")  # formats that store RGB without loss


@dataclass(frozen=True)
class OddImage:
    """An odd picture file, and the pixels that reading it must give."""

    path: Path
    story: str  # how the file was made
    pixels: np.ndarray | None = None  # (H, W, 3) uint8; None: the file may be refused


def write_odd_image(folder: Path, number: int) -> OddImage:
    """Write the file of this number in `folder`, unless it exists."""
    draw = np.random.default_rng([12, number])
    if draw.random() < 0.03:
        kind = PLACES[int(draw.integers(len(PLACES)))]
        return OddImage(place(folder, number, kind, b"no picture"), kind)
    kind = str(draw.choice(FORMATS))
    content, pixels, story = _encoded(draw, kind)
    changed = content
    for _ in range(int(draw.choice(4, p=(0.5, 0.35, 0.1, 0.05)))):
        how = CHANGES[int(draw.integers(len(CHANGES)))]
        changed, story = how(draw, changed), f"{story}, {how.__name__.strip('_')}"
    suffix = str(draw.choice(SUFFIXES))
    path = folder / (f"{number}.{suffix}" if suffix else f"{number}")
    put(path, changed)
    return OddImage(path, f"{story}, .{suffix}", pixels if changed == content else None)


def _encoded(draw: np.random.Generator, kind: str) -> tuple[bytes, np.ndarray | None, str]:
    """Encode a small picture. Returns its bytes, its pixels (None if they are not stored exactly), and a
    description."""
    width, height = (int(draw.choice(SIDES)) for _ in range(2))
    rgb = draw.integers(0, 256, (height, width, 3), np.uint8)
    mode = str(draw.choice(MODES))
    story = f"{kind} {mode} {width} x {height}"
    try:
        image = _in_mode(rgb, mode)
        options: dict[str, object] = {}
        turned = int(draw.integers(1, 9)) if draw.random() < 0.3 else 1
        if turned > 1 and kind in ("PNG", "JPEG", "WEBP", "TIFF"):
            exif = Image.Exif()
            exif[0x0112] = turned
            options["exif"] = exif
            story += f" turned {turned}"
        if draw.random() < 0.2 and kind in ("GIF", "WEBP", "PNG", "TIFF"):
            options |= {"save_all": True, "append_images": [image.transpose(Image.Transpose.ROTATE_180)]}
            story += " animated"
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
    except (OSError, ValueError, KeyError, SystemError):  # no such mode in this format
        return draw.bytes(int(draw.integers(2000))), None, "random bytes"
    plain = kind in EXACT and mode == "RGB" and "exif" not in options
    return buffer.getvalue(), rgb if plain else None, story


def _in_mode(rgb: np.ndarray, mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(rgb[..., 0].astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(rgb[..., 0].astype(np.float32))
    image = Image.fromarray(rgb)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(rgb[..., 2]))
        return image
    return image.convert(mode)
