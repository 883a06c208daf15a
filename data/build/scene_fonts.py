"""The fonts that scenes are printed in: from Debian's packages, some of them held out for a test split."""

from functools import cache
from pathlib import Path

from PIL import ImageFont

PACKAGES = ("fonts-dejavu-core", "fonts-dejavu-extra", "fonts-liberation", "fonts-freefont-ttf")
ROOT = Path("/usr/share/fonts/truetype")
TRAIN = (
    "dejavu/DejaVuSans.ttf",
    "dejavu/DejaVuSans-Bold.ttf",
    "dejavu/DejaVuSansCondensed.ttf",
    "dejavu/DejaVuSansCondensed-Bold.ttf",
    "dejavu/DejaVuSansMono.ttf",
    "dejavu/DejaVuSerif.ttf",
    "dejavu/DejaVuSerif-Bold.ttf",
    "dejavu/DejaVuSerifCondensed.ttf",
    "liberation/LiberationSans-Regular.ttf",
    "liberation/LiberationSans-Bold.ttf",
    "liberation/LiberationMono-Bold.ttf",
    "liberation/LiberationSerif-Regular.ttf",
    "freefont/FreeSansBold.ttf",
    "freefont/FreeSerifBold.ttf",
)
HELD_OUT = (
    "dejavu/DejaVuSansMono-Bold.ttf",
    "dejavu/DejaVuSerifCondensed-Bold.ttf",
    "liberation/LiberationSerif-Bold.ttf",
    "freefont/FreeSans.ttf",
    "freefont/FreeMonoBold.ttf",
)


def missing_fonts(root: Path = ROOT) -> str:
    """What to do about fonts that are not there: "" where all are."""
    absent = [name for name in (*TRAIN, *HELD_OUT) if not (root / name).is_file()]
    if not absent:
        return ""
    return f"{len(absent)} fonts are missing under {root} ({absent[0]}, ...): apt install {' '.join(PACKAGES)}"


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """size: pixels of the em."""
    return ImageFont.truetype(str(ROOT / name), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def width(name: str, size: int, text: str) -> float:
    """Pixels that a text takes."""
    return font(name, size).getlength(text)


def fitting(name: str, size: int, text: str, room: float, least: int = 11) -> int:
    """The largest size of at most `size` at which the text fits in `room` pixels, but no smaller than `least`."""
    while size > least and width(name, size, text) > room:
        size -= 1
    return size
