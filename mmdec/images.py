"""Pictures in: a path, bytes, a PIL image or an array becomes RGB of 8 bits. The only file of the package with PIL."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mmdec.types import InputError

MAX_PIXELS = 64_000_000  # of one picture; a decompression bomb is larger
MAX_BYTES = 64_000_000  # of one file
MAX_RATIO = 1000  # of the sides: 10000 x 10 pixels are taken
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]{1,20}://", re.IGNORECASE)
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")

ImageSource = str | Path | bytes | bytearray | memoryview | np.ndarray | Image.Image


def read_image(source: ImageSource, name: str = "image") -> np.ndarray:
    """(H, W, 3) uint8, RGB, the right way up: an EXIF rotation is undone.

    source: a path; a file's bytes; a PIL image; or an array, uint8, (H, W, 3). Transparency is laid over white, 16 bits
    become 8, of an animation the first frame is taken. name: what an error calls it. Raises InputError for what is
    missing, empty, no picture, cut off or too large, and for an address: nothing is downloaded.
    """
    if isinstance(source, np.ndarray):
        return _array(source, name)
    if isinstance(source, Image.Image):
        return _decode(source, name)
    if isinstance(source, bytes | bytearray | memoryview):
        return _open(bytes(source), name)
    if isinstance(source, str | Path):
        return _open(_read(source, name), f"{name} '{source}'")
    raise InputError(
        f"`{name}` must be a path, bytes, a PIL image or a uint8 array (H, W, 3), but is a {type(source).__name__}. "
        "Convert it first."
    )


def to_pil(pixels: np.ndarray) -> Image.Image:
    """A picture of `read_image` as PIL's, as transformers' processors take it."""
    return Image.fromarray(_array(pixels, "pixels"))


def _array(pixels: np.ndarray, name: str) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(
            f"`{name}` must be a uint8 array (H, W, 3), but is {pixels.dtype} {pixels.shape}. Convert it to RGB first."
        )
    _bound(pixels.shape[1], pixels.shape[0], name)
    return np.ascontiguousarray(pixels)


def _read(path: str | Path, name: str) -> bytes:
    if isinstance(path, str) and _ADDRESS.match(path):
        raise InputError(
            f"`{name}` must be a file, but is the address '{path}'. Download it first: nothing is fetched."
        )
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"`{name}` must be a readable file, but '{path}' is not: {error}. Check the path.") from None
    return content


def _open(content: bytes, what: str) -> np.ndarray:
    if not content:
        raise InputError(f"{what} must hold a picture, but is empty. Give a PNG, JPEG, WebP, GIF, BMP or TIFF.")
    if len(content) > MAX_BYTES:
        raise InputError(f"{what} must have at most {MAX_BYTES} bytes, but has more. Make it smaller.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL warns of large pictures, which `_bound` refuses, and of odd metadata
        try:
            with Image.open(io.BytesIO(content)) as image:
                return _decode(image, what)
        except InputError:
            raise
        except Image.DecompressionBombError:
            raise InputError(f"{what} must have at most {MAX_PIXELS} pixels, but has more. Make it smaller.") from None
        except Image.UnidentifiedImageError:
            raise InputError(
                f"{what} must be a picture, but its {len(content)} bytes are none that is known. "
                "Give a PNG, JPEG, WebP, GIF, BMP or TIFF."
            ) from None
        except Exception as error:  # PIL's decoders raise many kinds for a damaged file
            raise InputError(f"{what} must be a whole picture, but cannot be read: {error}. Is it cut off?") from None


def _bound(width: int, height: int, what: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
        raise InputError(
            f"{what} must have at most {MAX_PIXELS} pixels and sides of at most 1 to {MAX_RATIO}, but is {width} x "
            f"{height}. Make it smaller."
        )


def _decode(image: Image.Image, what: str) -> np.ndarray:
    if 0 in image.size:
        raise InputError(f"{what} must have pixels, but is {image.size[0]} x {image.size[1]}. Give another.")
    _bound(*image.size, what)  # before anything is decoded
    upright: Any = ImageOps.exif_transpose(image)
    if upright.mode in _SIXTEEN_BITS:
        values = np.asarray(upright).astype(np.float64)
        scale = 257 if values.max(initial=0) > 255 or upright.mode != "I" else 1
        upright = Image.fromarray(np.clip(values / scale, 0, 255).astype(np.uint8))
    elif upright.mode == "F":
        upright = Image.fromarray(np.clip(np.nan_to_num(np.asarray(upright)), 0, 255).astype(np.uint8))
    if upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, (255, 255, 255, 255)), upright)
    return np.array(upright.convert("RGB"))
