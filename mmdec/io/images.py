"""Reads an image from a path, bytes, a PIL image or an array, as 8-bit RGB. The only file of mmdec that imports PIL."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmdec.checks.arguments import format_value
from mmdec.checks.files import error_reason, open_regular, printable, quote_path
from mmdec.errors import InputError

# maximum pixels of an image. A small malicious file (a "decompression bomb") can declare more, to fill the memory
MAX_PIXELS = 64_000_000
MAX_BYTES = 64_000_000  # maximum bytes of an image file
# maximum ratio of the longer side to the shorter one; a processor would resize a thinner image to a huge one
MAX_RATIO = 1000
# the file formats that are read: for some other formats PIL would start external programs
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF")
_ORIENTATION = 0x0112  # the number of the EXIF tag that holds the orientation
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# PIL's raw modes of colours with 16 bits a sample, and the byte order in them
_DEEP_COLOURS = re.compile(r"(LA|RGB|RGBX|RGBA|RGBa);16([BLN])")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_FULL = 65535  # white of a 16-bit picture
_TWELVE_BITS = 4095  # a 16-bit file whose numbers end here or below holds fewer bits, not a dark picture
_BITS_PER_SAMPLE, _MAX_SAMPLE_VALUE = 258, 281  # numbers of TIFF tags
_PNG = b"\x89PNG\r\n\x1a\n"

ImageSource = str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray | Image.Image


def read_image(source: ImageSource, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read an image as RGB, (H, W, 3) uint8, and undo its EXIF rotation.

    Transparent images are drawn over white, 16 bits become 8 (see `_white`), and an animation gives its first frame.

    Args:
        source: A path; a file's bytes; a PIL image; or an array, uint8, (H, W, 3).
        max_pixels: Maximum number of pixels. A larger image raises an error before it is decoded. A larger JPEG file of
            at most MAX_PIXELS is decoded at a half, a quarter or an eighth of its sides instead, if that is small
            enough.

    Raises:
        InputError: If the file is missing, empty, no image, cut off or too large, and for a URL: nothing is downloaded.
    """
    if isinstance(source, np.ndarray):
        return _array(source, "`image`", max_pixels)
    if isinstance(source, Image.Image):
        return _call_decoder(lambda: _decode(source, "`image`", max_pixels), "`image`")
    if isinstance(source, bytes | bytearray | memoryview):
        return _open(bytes(source), "`image`", max_pixels)
    if isinstance(source, str | os.PathLike):
        return _open(_read(source), f"`image` '{quote_path(source)}'", max_pixels)
    raise InputError(
        f"`image` must be a path, bytes, a PIL image or a uint8 array (H, W, 3), but is {format_value(source)}. "
        "Convert it first."
    )


def to_pil(pixels: np.ndarray) -> Image.Image:
    """Convert an array from `read_image` to a PIL image, which transformers' processors accept."""
    return Image.fromarray(_array(pixels, "`pixels`", MAX_PIXELS))


def _array(pixels: np.ndarray, subject: str, max_pixels: int) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(
            f"{subject} must be a uint8 array (H, W, 3), but is {pixels.dtype} {pixels.shape}. Convert it to RGB first."
        )
    _check_size(pixels.shape[1], pixels.shape[0], subject, max_pixels)
    return np.ascontiguousarray(pixels)


def _read(path: str | os.PathLike[str]) -> bytes:
    with open_regular(path, "image") as descriptor, open(descriptor, "rb", closefd=False) as file:
        try:
            return file.read(MAX_BYTES + 1)
        except OSError as error:
            raise InputError(
                f"`image` must be a readable file, but '{quote_path(path)}' is not ({error_reason(error)}). Check "
                "the disk."
            ) from None


def _open(content: bytes, subject: str, max_pixels: int) -> np.ndarray:
    if not content:
        raise InputError(f"{subject} must hold a picture, but is empty. Give a PNG, JPEG, WebP, GIF, BMP or TIFF.")
    if len(content) > MAX_BYTES:
        raise InputError(f"{subject} must have at most {MAX_BYTES} bytes, but has more. Make it smaller.")

    def decode() -> np.ndarray:
        Image.init()  # loads PIL's format plugins, so that `formats` below can name some of them
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _shrink(image, max_pixels)
            return _decode(image, subject, max_pixels, content)

    return _call_decoder(decode, subject, len(content))


def _call_decoder(decode: Callable[[], np.ndarray], subject: str, size: int | None = None) -> np.ndarray:
    """Call `decode`, which uses PIL, and convert any exception to an InputError.

    Args:
        decode: Decodes the image and returns its pixels, (H, W, 3) uint8.
        subject: The image's name in errors.
        size: The file's size in bytes; None if the image is not from a file.
    """
    with warnings.catch_warnings():
        # PIL warns of large images, which `_check_size` rejects, and of unusual metadata, which does no harm
        warnings.simplefilter("ignore")
        try:
            return decode()
        except (InputError, MemoryError):
            raise
        except Image.DecompressionBombError:
            raise InputError(
                f"{subject} must have at most {MAX_PIXELS} pixels, but has more. Make it smaller."
            ) from None
        except Image.UnidentifiedImageError:
            raise InputError(
                f"{subject} must be a picture, but its {size} bytes are in no known format. "
                "Give a PNG, JPEG, WebP, GIF, BMP or TIFF."
            ) from None
        except Exception as error:  # PIL's decoders raise many kinds of errors for a damaged file
            raise InputError(
                f"{subject} must be a whole picture, but cannot be read: {printable(str(error))[:200]}. Is it cut off?"
            ) from None


def _check_size(width: int, height: int, subject: str, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_RATIO * min(width, height):
        raise InputError(
            f"{subject} must have at most {max_pixels} pixels and sides of at most 1 to {MAX_RATIO}, but is {width} x "
            f"{height}. Make it smaller."
        )


def _shrink(image: Image.Image, max_pixels: int) -> None:
    """If a JPEG is too large, make PIL decode it at 1/2, 1/4 or 1/8 of its sides, if that is small enough.

    Images in other formats are not changed.
    """
    width, height = image.size
    if max_pixels < width * height <= MAX_PIXELS:
        parts = (part for part in (2, 4, 8) if -(-width // part) * -(-height // part) <= max_pixels)
        part = next(parts, 1)
        image.draft(None, (max(width // part, 1), max(height // part, 1)))


def _decode(image: Image.Image, subject: str, max_pixels: int, content: bytes = b"") -> np.ndarray:
    """Decode an image to RGB, (H, W, 3) uint8.

    Args:
        content: Its file; b"" if there is none.
    """
    if 0 in image.size:
        raise InputError(f"{subject} must have pixels, but is {image.size[0]} x {image.size[1]}. Give another one.")
    _check_size(*image.size, subject, max_pixels)  # before anything is decoded, because a bomb would fill the memory
    order = _deep_colours(image) if content else None
    image.load()  # a file that is cut off fails here
    upright = _upright(image)
    if upright.mode == "La":  # PIL converts this mode to LA only
        upright = upright.convert("LA")
    bits = _significant_bits(content)
    if order is not None:
        upright = _upright(_from_deep_colours(image, content, *order, bits), image)
    elif upright.mode in _SIXTEEN_BITS:
        values = np.asarray(upright).astype(np.float64)
        white = _white(image, int(values.max(initial=0)), bits[:1])
        upright = Image.fromarray(np.clip(values * 255 / white, 0, 255).astype(np.uint8))
    elif upright.mode == "F":
        values = np.nan_to_num(np.asarray(upright))
        white = 1 if values.max(initial=0) <= 1 else 255  # by convention, floating point counts from 0 to 1
        upright = Image.fromarray(np.clip(values * (255 / white), 0, 255).astype(np.uint8))
    if upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, (255, 255, 255, 255)), upright)
    return np.array(upright.convert("RGB"))


def _deep_colours(image: Any) -> tuple[str, str] | None:
    """Return the channels and the byte order of an opened file with 16 bits a colour; None for other files."""
    arguments = {tile.args if isinstance(tile.args, str) else tile.args[0] for tile in image.tile}
    deep = _DEEP_COLOURS.fullmatch(str(arguments.pop())) if len(arguments) == 1 else None
    return None if deep is None else (deep[1], deep[2])


def _from_deep_colours(
    image: Image.Image, content: bytes, channels: str, order: str, bits: Sequence[int]
) -> Image.Image:
    """Convert an image with 16 bits a colour (PIL keeps only their high bytes) to 8 bits by `_white`.

    The raw mode of the other byte order keeps the low bytes. Colours and alpha have a white each.
    """
    if channels == "LA":  # PIL knows one byte order; four channels of 8 bits are the same bytes
        high, low = np.split(_reread(content, "RGBA").reshape(*image.size[::-1], 2, 2), 2, -1)
        high, low = high[..., 0], low[..., 0]
    else:
        mode = channels.upper()
        order = {"little": "L", "big": "B"}[sys.byteorder] if order == "N" else order
        high, low = (_reread(content, f"{mode};16{each}") for each in (order, "L" if order == "B" else "B"))
    values = high.astype(np.uint16) << 8 | low
    alpha = values[..., -1] if values.shape[-1] in (2, 4) and channels != "RGBX" else None
    colours = values[..., : 1 if channels == "LA" else 3]
    key = image.info.get("transparency")  # the colour of transparent pixels
    bytes_of_colours = _to_bytes(colours, _white(image, int(colours.max(initial=0)), bits[: colours.shape[-1]]))
    if alpha is None:
        clear = np.zeros(colours.shape[:2], bool) if key is None else (colours == key).all(-1)
        alpha = np.where(clear, 0, 255).astype(np.uint8)
    else:
        alpha = _to_bytes(alpha, _white(image, int(alpha.max(initial=0)), bits[-1:]))
    rgb = np.broadcast_to(bytes_of_colours, (*bytes_of_colours.shape[:2], 3))
    mode = "RGBa" if channels == "RGBa" else "RGBA"
    return Image.frombytes(mode, image.size, np.dstack([rgb, alpha]).tobytes()).convert("RGBA")


def _reread(content: bytes, rawmode: str) -> np.ndarray:
    """Decode a file with another raw mode of PIL.

    Returns:
        (H, W, channels) uint8.
    """
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        tiles: list[Any] = image.tile
        image.tile = [
            type(tile)(*tile[:3], rawmode if isinstance(tile.args, str) else (rawmode, *tile.args[1:]))
            for tile in tiles
        ]
        return np.asarray(image)


def _to_bytes(values: np.ndarray, white: int) -> np.ndarray:
    """Scale numbers of 16 bits so that `white` becomes 255. A table needs less memory than floating point."""
    table = np.clip(np.arange(_FULL + 1) * 255 / white, 0, 255).astype(np.uint8)
    return table[values]


def _white(image: Image.Image, largest: int, bits: Sequence[int]) -> int:
    """Return the number that stands for white in channels with 16 or 32 bits.

    It is the range that the file states (TIFF's MaxSampleValue or fewer than 16 BitsPerSample, PNG's sBIT), if the
    numbers stay within it. Otherwise it is 65535, so that a 16-bit picture keeps its brightness. But if the numbers fit
    into 12 bits, or exceed 16, the largest number is white.

    Args:
        largest: The channels' largest number.
        bits: Their significant bits as a PNG file states them.
    """
    if image.mode == "I" and image.format is None and largest <= 255:
        return 255  # a caller's own image of 8-bit numbers
    tags: Any = getattr(image, "tag_v2", {})
    (depth, *_), (most, *_) = (_numbers(tags.get(tag)) for tag in (_BITS_PER_SAMPLE, _MAX_SAMPLE_VALUE))
    significant = max(bits, default=None)
    for stated in (most, *(2**count - 1 for count in (depth, significant) if count is not None and 0 < count < 16)):
        if stated is not None and 0 < largest <= stated <= _FULL:
            return stated
    return max(largest, 1) if largest <= _TWELVE_BITS or largest > _FULL else _FULL


def _numbers(value: object) -> tuple[int | None, ...]:
    """Return a TIFF tag's whole numbers; (None,) if there are none: tags come from the file and may hold anything."""
    values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    return values if values and all(isinstance(item, int) for item in values) else (None,)


def _significant_bits(content: bytes) -> bytes:
    """Return the significant bits of each channel from the sBIT chunk of a PNG file; b"" without one.

    PIL does not read this chunk.
    """
    if not content.startswith(_PNG):
        return b""
    at = len(_PNG)
    while at + 9 <= len(content) and content[at + 4 : at + 8] != b"IDAT":
        if content[at + 4 : at + 8] == b"sBIT":
            return content[at + 8 : at + 8 + min(int.from_bytes(content[at : at + 4], "big"), 4)]
        at += 12 + int.from_bytes(content[at : at + 4], "big")
    return b""


def _upright(image: Image.Image, source: Image.Image | None = None) -> Image.Image:
    """Undo an image's EXIF rotation.

    If the metadata is damaged, the image is returned as it is.

    Args:
        source: The image that has the metadata; None: `image`.
    """
    try:
        turn = _TURNS.get((source or image).getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # PIL raises many kinds of errors, even SyntaxError
        return image
    return image if turn is None else image.transpose(turn)
