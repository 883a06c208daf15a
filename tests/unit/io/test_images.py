"""Tests reading of pictures: every mode becomes RGB, rotations are applied, and other files give one clear error."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmdec.errors import InputError
from mmdec.io import images
from mmdec.io.images import read_image, to_pil


def gradient(width: int = 8, height: int = 6) -> np.ndarray:
    """Return a picture without equal pixels and without grey."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 20 + 10, columns * 20 + 40, 255 - rows * 9 - columns], -1).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    pixels = gradient()
    content = encoded(Image.fromarray(pixels))
    path = tmp_path / "a picture é.png"
    path.write_bytes(content)
    sources = (path, str(path), content, bytearray(content), memoryview(content), Image.fromarray(pixels), pixels)
    for source in sources:
        result = read_image(source)
        assert result.dtype == np.uint8
        np.testing.assert_array_equal(result, pixels)
    np.testing.assert_array_equal(np.asarray(to_pil(pixels)), pixels)


def test_errors_name_the_argument(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"none")
    for source in (b"", b"none", file, 3):
        with pytest.raises(InputError) as caught:
            read_image(source)  # type: ignore[arg-type]
        assert caught.value.argument == "image"


def test_an_array_is_not_shared_with_a_picture() -> None:
    image = Image.fromarray(gradient())
    read_image(image)[:] = 0
    np.testing.assert_array_equal(np.asarray(image), gradient())


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_rotation_is_undone(turn: int) -> None:
    upright = Image.fromarray(gradient())
    back = {
        1: (), 2: (Image.Transpose.FLIP_LEFT_RIGHT,), 3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,), 5: (Image.Transpose.TRANSPOSE,), 6: (Image.Transpose.ROTATE_90,),
        7: (Image.Transpose.TRANSVERSE,), 8: (Image.Transpose.ROTATE_270,),
    }[turn]  # fmt: skip
    stored = upright
    for step in back:
        stored = stored.transpose(step)
    exif = Image.Exif()
    exif[0x0112] = turn
    np.testing.assert_array_equal(read_image(encoded(stored, exif=exif)), gradient())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_metadata_does_not_lose_a_picture(kind: str) -> None:
    pixels, exif = gradient(), Image.Exif()
    exif[0x0112] = 6
    options = {} if kind == "JPEG" else {"lossless": True}
    expected = read_image(encoded(Image.fromarray(pixels), kind, **options))
    for damaged in (b"Exif\0\0no header at all", b"Exif\0\0II", b"xx", b"Exif\0\0" + exif.tobytes()[6:-9]):
        np.testing.assert_array_equal(
            read_image(encoded(Image.fromarray(pixels), kind, exif=damaged, **options)), expected
        )
    # The rotation counts, whatever else is wrong: here a tag of letters that is said to hold fractions.
    mixed = (
        b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\x1a\x01\x05\0\x01\0\0\0\xff\xff\0\0\0\0\0\0"
    )
    assert read_image(encoded(Image.fromarray(pixels), kind, exif=mixed, **options)).shape == (8, 6, 3)


def test_every_colour_mode_is_read() -> None:
    pixels = gradient()
    rgb = Image.fromarray(pixels)
    palette = rgb.quantize(64)
    np.testing.assert_array_equal(read_image(encoded(palette)), np.asarray(palette.convert("RGB")))
    clear = rgb.copy()
    clear.putalpha(0)
    assert (read_image(encoded(clear)) == 255).all()  # nothing but the white below
    half = rgb.copy()
    half.putalpha(128)
    assert np.abs(read_image(encoded(half)).astype(int) - (pixels.astype(int) * 128 + 255 * 127) // 255).max() <= 1
    grey = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    np.testing.assert_array_equal(read_image(encoded(Image.fromarray(grey)))[..., 2], grey)
    deep = grey.astype(np.uint16) * 257
    np.testing.assert_array_equal(read_image(encoded(Image.fromarray(deep)))[..., 0], grey)
    np.testing.assert_array_equal(read_image(encoded(Image.fromarray(deep), "TIFF"))[..., 0], grey)
    cmyk = read_image(encoded(rgb.convert("CMYK"), "TIFF"))
    assert np.abs(cmyk.astype(int) - pixels).max() <= 2
    bits = Image.fromarray(grey > 100)
    np.testing.assert_array_equal(read_image(encoded(bits))[..., 0], (grey > 100) * np.uint8(255))
    transparent = palette.copy()
    transparent.info["transparency"] = int(np.asarray(palette)[0, 0])
    assert (read_image(encoded(transparent, transparency=int(np.asarray(palette)[0, 0])))[0, 0] == 255).all()


def grey_tiff(numbers: np.ndarray, bits: int = 16, largest: int | None = None) -> bytes:
    """Return a TIFF of one channel with `bits` bits a sample. largest: its MaxSampleValue."""
    height, width = numbers.shape
    rows = "".join("".join(f"{number:0{bits}b}" for number in row) for row in numbers.tolist())
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, 1), (273, 8), (277, 1), (278, height)]
    data = int(rows, 2).to_bytes(len(rows) // 8, "big")
    tags += [(279, len(data)), *([] if largest is None else [(281, largest)])]
    order, mark = (">", b"MM\0*") if bits == 16 else ("<", b"II*\0")  # PIL reads 12 bits in the latter alone
    entries = b"".join(struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    return mark + struct.pack(f"{order}I", 8 + len(data)) + data + directory


def grey_png(numbers: np.ndarray, significant: int | None = None) -> bytes:
    """Return a 16-bit PNG of one channel. significant: the bits that its chunk sBIT states."""
    content = encoded(Image.fromarray(numbers.astype(np.uint16)))
    if significant is None:
        return content
    chunk = b"sBIT" + bytes([significant])
    return content[:33] + struct.pack(">I", 1) + chunk + struct.pack(">I", zlib.crc32(chunk)) + content[33:]


@pytest.mark.parametrize("largest", [1, 30, 255, 256, 1023, 4095])
@pytest.mark.parametrize("write", [grey_png, grey_tiff])
def test_a_picture_of_few_bits_in_16_is_not_black(write: Callable[[np.ndarray], bytes], largest: int) -> None:
    numbers = np.linspace(0, largest, 48).round().astype(int).reshape(6, 8)
    np.testing.assert_array_equal(read_image(write(numbers))[..., 0], numbers * 255 // largest)


@pytest.mark.parametrize("largest", [4096, 20_000, 65_535])
@pytest.mark.parametrize("write", [grey_png, grey_tiff])
def test_a_16_bit_picture_keeps_its_brightness(write: Callable[[np.ndarray], bytes], largest: int) -> None:
    numbers = np.linspace(0, largest, 48).round().astype(int).reshape(6, 8)
    np.testing.assert_array_equal(read_image(write(numbers))[..., 0], numbers // 257)


@pytest.mark.parametrize(
    ("write", "white"),
    [
        (partial(grey_png, significant=12), 4095),
        (partial(grey_png, significant=10), 1023),
        (partial(grey_tiff, bits=12), 4095),
        (partial(grey_tiff, largest=4095), 4095),
        (partial(grey_tiff, largest=16_383), 16_383),
        (partial(grey_tiff, largest=65_535), 65_535),
        (partial(grey_tiff, largest=10), 1000),  # a statement that the numbers contradict does not count
        (partial(grey_png, significant=0), 1000),
    ],
)
def test_white_is_the_range_that_the_file_states(write: Callable[[np.ndarray], bytes], white: int) -> None:
    numbers = np.linspace(0, 1000, 48).round().astype(int).reshape(6, 8)
    np.testing.assert_array_equal(read_image(write(numbers))[..., 0], numbers * 255 // white)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def deep_png(numbers: np.ndarray, significant: bytes = b"", key: bytes = b"") -> bytes:
    """Return a 16-bit PNG of 2 (grey and alpha), 3 (RGB) or 4 (RGBA) channels. key: its chunk tRNS."""
    height, width, channels = numbers.shape
    head = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    optional = [chunk(name, content) for name, content in ((b"sBIT", significant), (b"tRNS", key)) if content]
    data, before = b"", np.zeros((width, channels * 2), np.uint8)
    for row in numbers.astype(">u2"):  # each row is stored as the difference from the one above (filter 2)
        content = row.view(np.uint8).reshape(width, -1)
        data, before = data + b"\2" + (content - before).tobytes(), content
    ending = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(optional) + ending


def deep_tiff(
    numbers: np.ndarray, order: str = "<", packed: bool = False, extra: int | None = 2, turn: int = 1
) -> bytes:
    """Return a 16-bit TIFF of 3 or 4 channels. extra: what the fourth is (ExtraSamples): 0 nothing, 1 alpha that the
    colours
    are multiplied by, 2 alpha. turn: its Orientation."""
    height, width, channels = numbers.shape
    data = numbers.astype(f"{order}u2").tobytes()
    data = zlib.compress(data) if packed else data
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, channels, 8), (259, 3, 1, 8 if packed else 1)]
    tags += [(262, 3, 1, 2), (273, 4, 1, 16), (274, 3, 1, turn), (277, 3, 1, channels), (278, 4, 1, height)]
    tags += [(279, 4, 1, len(data)), *([(338, 3, 1, extra)] if channels == 4 else [])]
    entries = b"".join(
        struct.pack(f"{order}HHI", tag, kind, count)
        + (struct.pack(f"{order}HH", value, 0) if (kind, count) == (3, 1) else struct.pack(f"{order}I", value))
        for tag, kind, count, value in tags
    )
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 16 + len(data))
    return start + struct.pack(f"{order}4H", *[16] * 4) + data + directory


DEEP_TIFFS = [partial(deep_tiff, order=order, packed=packed) for order in "<>" for packed in (False, True)]


def deep_numbers(largest: int, channels: int, alpha: int = 65_535) -> np.ndarray:
    numbers = np.linspace(0, largest, 48 * channels).round().astype(int).reshape(6, 8, channels)
    if channels in (2, 4):
        numbers[..., -1] = alpha
        numbers[-1, -1, :-1] = largest
    return numbers


@pytest.mark.parametrize("largest", [1, 30, 255, 1000, 4095])
@pytest.mark.parametrize(
    ("write", "channels"),
    [(deep_png, 2), (deep_png, 3), (deep_png, 4), *((write, channels) for write in DEEP_TIFFS for channels in (3, 4))],
)
def test_colours_of_few_bits_in_16_are_not_black(
    write: Callable[[np.ndarray], bytes], channels: int, largest: int
) -> None:
    numbers = deep_numbers(largest, channels)
    expected = np.broadcast_to(numbers[..., : 1 if channels == 2 else 3] * 255 // largest, (6, 8, 3))
    np.testing.assert_array_equal(read_image(write(numbers)), expected)
    same = deep_numbers(largest, channels, alpha=largest)  # alpha has as few bits
    np.testing.assert_array_equal(read_image(write(same)), expected)


@pytest.mark.parametrize(("write", "channels"), [(deep_png, 3), (deep_png, 4), (DEEP_TIFFS[0], 3), (DEEP_TIFFS[3], 4)])
def test_16_bit_colours_keep_their_brightness(write: Callable[[np.ndarray], bytes], channels: int) -> None:
    for largest in (4096, 20_000, 65_535):
        numbers = deep_numbers(largest, channels)
        np.testing.assert_array_equal(read_image(write(numbers)), numbers[..., :3] // 257)


def test_what_a_16_bit_file_states_about_its_colours() -> None:
    numbers = deep_numbers(1000, 4, alpha=1023)
    stated = read_image(deep_png(numbers, significant=bytes([10, 12, 10, 10])))
    np.testing.assert_array_equal(stated, numbers[..., :3] * 255 // 4095)  # one white, so that hues stay
    key = numbers[2, 3, :3].astype(">u2").tobytes()
    result = read_image(deep_png(numbers[..., :3], key=key))
    assert np.argwhere((result == 255).all(-1)).tolist() == [[2, 3], [5, 7]]  # the other is the brightest
    turned = read_image(deep_tiff(numbers, turn=6))
    np.testing.assert_array_equal(turned, np.rot90(numbers[..., :3] * 255 // 1000, -1))


def test_16_bit_alpha_lies_over_white() -> None:
    numbers = deep_numbers(65_535, 4, alpha=0)
    numbers[0, 0, 3], numbers[0, 1, 3] = 65_535, 32_896
    for write in (deep_png, *DEEP_TIFFS):
        result = read_image(write(numbers))
        np.testing.assert_array_equal(result[0, 0], numbers[0, 0, :3] // 257)
        np.testing.assert_allclose(result[0, 1], (numbers[0, 1, :3] / 257 + 255) / 2, atol=2)
        assert (result[1:] == 255).all()
    numbers[..., 3] = 32_896
    multiplied = np.concatenate([numbers[..., :3] // 2, numbers[..., 3:]], -1)
    np.testing.assert_allclose(read_image(deep_tiff(multiplied, extra=1)), (numbers[..., :3] / 257 + 255) / 2, atol=3)
    np.testing.assert_array_equal(read_image(deep_tiff(numbers, extra=0)), numbers[..., :3] // 257)


def test_zeros_of_16_bits_are_black() -> None:
    assert (read_image(grey_png(np.zeros((6, 8), int))) == 0).all()


@pytest.mark.parametrize("largest", [0.5, 1.0, 255.0])
def test_floats_range_to_one_or_to_255(largest: float) -> None:
    numbers = np.linspace(0, largest, 48, dtype=np.float32).reshape(6, 8)
    expected = (numbers * (255 if largest <= 1 else 1)).astype(np.uint8)
    np.testing.assert_array_equal(read_image(encoded(Image.fromarray(numbers), "TIFF"))[..., 0], expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (9, 7), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    result = read_image(encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    assert result.shape == (7, 9, 3)
    assert (result == (255, 0, 0)).all()


@pytest.mark.parametrize("size", [(1, 1), (10000, 10), (10, 10000), (3, 2)])
def test_images_of_odd_sizes_are_read(size: tuple[int, int]) -> None:
    assert read_image(encoded(Image.new("RGB", size, (1, 2, 3)))).shape == (size[1], size[0], 3)


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG that says it is large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def test_pixels_are_bounded_before_they_are_decoded() -> None:
    """The picture has no data, so decoding it would fail as truncated."""
    assert len(bomb(2000, 2000)) < 100
    with pytest.raises(InputError, match=r"must have at most 3999999 pixels .* but is 2000 x 2000"):
        read_image(bomb(2000, 2000), max_pixels=3_999_999)
    with pytest.raises(InputError, match="cut off"):
        read_image(bomb(2000, 2000), max_pixels=4_000_000)
    pixels = gradient(20, 10)
    for source in (pixels, Image.fromarray(pixels), encoded(Image.fromarray(pixels), "WEBP")):
        with pytest.raises(InputError, match="at most 199 pixels"):
            read_image(source, max_pixels=199)
        assert read_image(source, max_pixels=200).shape == (10, 20, 3)


@pytest.mark.parametrize(
    ("size", "result"),
    [((40, 20), (40, 20)), ((41, 20), (21, 10)), ((100, 100), (25, 25)), ((161, 303), (21, 38))],
)
def test_a_large_jpeg_is_decoded_at_a_part_of_its_sides(size: tuple[int, int], result: tuple[int, int]) -> None:
    content = encoded(Image.new("RGB", size, (10, 200, 30)), "JPEG")
    small = read_image(content, max_pixels=800)
    assert small.shape == (result[1], result[0], 3)
    assert np.abs(small.astype(int) - (10, 200, 30)).max() <= 3


def test_a_large_jpeg_still_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.new("RGB", (80, 40)), "JPEG", exif=exif)
    assert read_image(content, max_pixels=1000).shape == (40, 20, 3)


def test_enormous_jpegs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 3000)
    with pytest.raises(InputError, match="at most 1000 pixels"):
        read_image(encoded(Image.new("RGB", (80, 40)), "JPEG"), max_pixels=1000)


def test_damaged_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)))
    files = {
        "empty.png": (b"", "is empty"),
        "text.png": (b"not a picture at all", "in no known format"),
        "cut.png": (whole[: len(whole) // 2], "cut off"),
        "bomb.png": (bomb(60_000, 60_000), "pixels"),
        "long.png": (bomb(50_000, 1), "1 to 1000"),
    }
    for name, (content, message) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        for source in (path, content):
            with pytest.raises(InputError, match=message):
                read_image(source)
    with pytest.raises(InputError, match="does not exist"):
        read_image(tmp_path / "missing.png")
    with pytest.raises(InputError, match="is a folder"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="is a pipe"):
        read_image(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="can be read"):
        read_image("a\0b.png")
    with pytest.raises(InputError, match="is not a file name"):
        read_image("a" * 100_000)
    addresses = ("https://example.org/a.png", "http://x", "ftp://x/y.jpg", "file:///etc/passwd", "S3://a/b")
    for address in (*addresses, f"data:image/png;base64,{'A' * 100_000}"):
        for source in (address, Path(address)):
            with pytest.raises(InputError, match="address") as caught:
                read_image(source)
            assert len(str(caught.value)) < 500
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="at most 100 bytes"):
        read_image(whole)
    with pytest.raises(InputError, match="at most 100 bytes"):
        read_image(tmp_path / "cut.png")


def test_formats_that_run_other_programs_are_refused(tmp_path: Path) -> None:
    """PIL reads EPS with Ghostscript."""
    with pytest.raises(InputError, match="in no known format"):
        read_image(encoded(Image.fromarray(gradient()), "EPS"))
    (tmp_path / "https:").mkdir()
    (tmp_path / "https:" / "a.png").write_bytes(encoded(Image.fromarray(gradient())))
    with contextlib.chdir(tmp_path):  # a folder may have this name
        assert read_image(Path("https:/a.png")).shape == (6, 8, 3)


def test_an_unreadable_pil_image_is_one_error(tmp_path: Path) -> None:
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)))
    with pytest.raises(InputError, match="cut off"):
        read_image(Image.open(io.BytesIO(whole[: len(whole) // 2])))
    closed = Image.open(io.BytesIO(whole))
    closed.close()
    with pytest.raises(InputError, match="cannot be read"):
        read_image(closed)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
        None,
        7,
        [1, 2],
    ],
)
def test_other_arrays_and_kinds_are_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="uint8"):
        read_image(wrong)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_give_a_picture_or_one_kind_of_error(content: bytes, begin: int) -> None:
    heads = (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a")
    with contextlib.suppress(InputError):
        assert read_image(heads[begin] + content).ndim == 3
