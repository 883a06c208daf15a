"""A picture of 128 x 128 pixels that knows what its patches show.

A patch of 16 x 16 pixels has eight cells, 2 rows of 4, each 4 pixels wide and 8 high: about half a printed letter. A
cell's label is the letter whose middle lies in it, or the thing that covers its middle, and the thing's colour.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import scene_fonts
from PIL import Image, ImageDraw
from scene_words import COLOURS, THINGS

SIDE, PATCH = 128, 16
CELL_WIDTH, CELL_HEIGHT = 4, 8
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:-"
CLASSES = ("", *CHARACTERS, *THINGS)  # what a cell may show; 0 is nothing
TINTS = ("", *COLOURS)
Point = tuple[float, float]
Rgb = tuple[int, int, int]


def shade(colour: Rgb, draw: Random, spread: int = 16) -> Rgb:
    """A colour near this one."""
    red, green, blue = (min(255, max(0, value + draw.randint(-spread, spread))) for value in colour)
    return red, green, blue


class Canvas:
    """Drawn on, then finished. `draw` gives the picture's own randomness."""

    def __init__(self, background: Rgb, draw: Random) -> None:
        self.image = Image.new("RGB", (SIDE, SIDE), background)
        self.pen = ImageDraw.Draw(self.image)
        self.background = background
        self.draw = draw
        self.classes, self.tints = (Image.new("L", (SIDE, SIDE)) for _ in range(2))
        self.class_pen, self.tint_pen = ImageDraw.Draw(self.classes), ImageDraw.Draw(self.tints)
        self.letters: list[tuple[float, float, int]] = []
        self.lines: list[tuple[str, list[int]]] = []  # each printed text, and which of `letters` its characters are

    def text(self, at: Point, text: str, font: str, size: int, ink: Rgb) -> float:
        """Print with the left end of the line's middle `at`; returns the width in pixels."""
        self.pen.text(at, text, font=scene_fonts.font(font, size), fill=ink, anchor="lm")
        numbers = [-1] * len(text)
        self.lines.append((text, numbers))
        for index, letter in enumerate(text):
            if letter in CHARACTERS:
                numbers[index] = len(self.letters)
                left = scene_fonts.width(font, size, text[:index])
                right = scene_fonts.width(font, size, text[: index + 1])
                self.letters.append((at[0] + (left + right) / 2, at[1], CLASSES.index(letter)))
        return scene_fonts.width(font, size, text)

    def panel(self, box: Sequence[float], colour: str, rgb: Rgb, outline: Rgb | None = None, radius: int = 0) -> None:
        """A board to print on: a colour, but no thing."""
        self.pen.rounded_rectangle(box, radius, rgb, outline)
        self.tint_pen.rectangle(box, TINTS.index(colour) if colour else 0)

    def thing(self, name: str, colour: str, at: Point, radius: float) -> None:
        """A thing of a room, a street or a map; radius: half its size in pixels."""
        rgb = shade(COLOURS[colour], self.draw)
        dark: Rgb = tuple(int(value * 0.55) for value in rgb)  # type: ignore[assignment]
        if colour == "black":
            dark = (95, 95, 100)
        shape(self.pen, name, at, radius, rgb, dark)
        left, top, right, bottom = at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius
        self.class_pen.rectangle((left, top, right, bottom), CLASSES.index(name))
        self.tint_pen.rectangle((left, top, right, bottom), TINTS.index(colour))

    def hide(self) -> None:
        """A thin post, a leaf or a stain before the picture."""
        kind = self.draw.randrange(3)
        grey: Rgb = (self.draw.randint(70, 190),) * 3
        x, y = self.draw.uniform(0, SIDE), self.draw.uniform(0, SIDE)
        if kind == 0:
            self.pen.line((x, 0, x + self.draw.uniform(-20, 20), SIDE), grey, 1)
        elif kind == 1:
            self.pen.line((0, y, SIDE, y + self.draw.uniform(-20, 20)), grey, 1)
        else:
            stain = Image.new("L", (SIDE, SIDE))
            size = self.draw.uniform(8, 22)
            ImageDraw.Draw(stain).ellipse((x - size, y - size, x + size, y + size), self.draw.randint(30, 70))
            self.image.paste(Image.new("RGB", (SIDE, SIDE), grey), mask=stain)

    def finish(self) -> tuple[np.ndarray, np.ndarray, list[tuple[str, list[int]]]]:
        """The picture, (128, 128, 3) uint8; its cells' labels, (64, 8, 2) uint8: class and colour; and each printed
        text with the patch of each of its characters, -1 for a space or what lies outside the picture."""
        if self.draw.random() < 0.3:
            self.hide()
        classes, tints, letters = self.classes, self.tints, self.letters
        if self.draw.random() < 0.35:
            angle = self.draw.uniform(-5, 5)
            self.image = self.image.rotate(angle, Image.Resampling.BICUBIC, fillcolor=self.background)
            classes, tints = classes.rotate(angle), tints.rotate(angle)
            sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
            middle = SIDE / 2
            letters = [
                (
                    middle + (x - middle) * cosine + (y - middle) * sine,
                    middle - (x - middle) * sine + (y - middle) * cosine,
                    letter,
                )
                for x, y, letter in letters
            ]
        pixels = np.asarray(self.image, np.float32)
        if self.draw.random() < 0.5:
            pixels = (pixels - 128) * self.draw.uniform(0.75, 1.1) + 128 + self.draw.uniform(-22, 14)
        if self.draw.random() < 0.5:
            noise = np.random.default_rng(self.draw.getrandbits(32)).standard_normal((SIDE, SIDE, 1), np.float32)
            pixels = pixels + noise * self.draw.uniform(2, 14)
        pixels = np.clip(pixels, 0, 255).astype(np.uint8)
        patches = [patch_at(x, y) for x, y, _ in letters]
        prints = [
            (text, [patches[number] if number >= 0 else -1 for number in numbers]) for text, numbers in self.lines
        ]
        return pixels, label_cells(classes, tints, letters), prints


def patch_at(x: float, y: float) -> int:
    """The patch of a point, counted row by row; -1 outside the picture."""
    inside = 0 <= x < SIDE and 0 <= y < SIDE
    return int(y) // PATCH * (SIDE // PATCH) + int(x) // PATCH if inside else -1


def label_cells(classes: Image.Image, tints: Image.Image, letters: Sequence[tuple[float, float, int]]) -> np.ndarray:
    """(64, 8, 2): patches row by row; of each, its cells row by row."""
    middle = np.s_[CELL_HEIGHT // 2 :: CELL_HEIGHT, CELL_WIDTH // 2 :: CELL_WIDTH]
    grid = np.stack([np.asarray(classes)[middle], np.asarray(tints)[middle]], -1)  # (16, 32, 2)
    for x, y, letter in letters:
        if 0 <= x < SIDE and 0 <= y < SIDE:
            grid[int(y) // CELL_HEIGHT, int(x) // CELL_WIDTH, 0] = letter
    patches, across, down = SIDE // PATCH, PATCH // CELL_WIDTH, PATCH // CELL_HEIGHT
    return grid.reshape(patches, down, patches, across, 2).transpose(0, 2, 1, 3, 4).reshape(patches**2, -1, 2)


def shape(pen: ImageDraw.ImageDraw, name: str, at: Point, r: float, rgb: Rgb, dark: Rgb) -> None:
    """Draw one thing of the lists."""
    x, y = at

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return (x + left * r, y + top * r, x + right * r, y + bottom * r)

    def points(*pairs: Point) -> list[Point]:
        return [(x + a * r, y + b * r) for a, b in pairs]

    if name == "ball":
        pen.ellipse(box(-1, -1, 1, 1), rgb, dark)
    elif name == "box":
        pen.rectangle(box(-0.9, -0.9, 0.9, 0.9), rgb, dark)
    elif name == "cone":
        pen.polygon(points((0, -1), (1, 0.9), (-1, 0.9)), rgb, dark)
    elif name == "star":
        tips = [(math.sin(i * math.pi / 5), -math.cos(i * math.pi / 5)) for i in range(10)]
        pen.polygon(
            points(*[(a * k, b * k) for i, (a, b) in enumerate(tips) for k in (0.45 if i % 2 else 1.08,)]), rgb, dark
        )
    elif name == "heart":
        pen.polygon(
            points((0, 1), (-0.95, 0), (-0.9, -0.6), (-0.5, -0.9), (0, -0.5), (0.5, -0.9), (0.9, -0.6), (0.95, 0)),
            rgb, dark,
        )  # fmt: skip
    elif name == "ring":
        pen.ellipse(box(-1, -1, 1, 1), outline=dark, width=max(4, round(r * 0.5)))
        pen.ellipse(box(-0.94, -0.94, 0.94, 0.94), outline=rgb, width=max(3, round(r * 0.38)))
    elif name == "cross":
        a = 0.34
        pen.polygon(
            points(
                (-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a),
                (a, 1), (-a, 1), (-a, a), (-1, a), (-1, -a), (-a, -a),
            ),
            rgb, dark,
        )  # fmt: skip
    elif name == "moon":
        outer = [(-math.cos(t) * 1.0 + 0.25, math.sin(t)) for t in np.linspace(-2.0, 2.0, 14)]
        inner = [(-math.cos(t) * 0.62 + 0.52, math.sin(t) * 0.72) for t in np.linspace(1.75, -1.75, 12)]
        pen.polygon(points(*outer, *inner), rgb, dark)
    elif name == "car":
        pen.polygon(
            points((-1, 0.5), (-1, 0), (-0.55, -0.1), (-0.3, -0.6), (0.4, -0.6), (0.65, -0.1), (1, 0), (1, 0.5)),
            rgb, dark,
        )  # fmt: skip
        for side in (-0.55, 0.55):
            pen.ellipse(box(side - 0.26, 0.25, side + 0.26, 0.77), (40, 40, 40), (150, 150, 150))
    elif name == "bus":
        pen.rectangle(box(-1, -0.85, 1, 0.6), rgb, dark)
        for side in (-0.8, -0.2, 0.4):
            pen.rectangle(box(side, -0.6, side + 0.4, -0.1), (205, 225, 240), dark)
        for side in (-0.55, 0.55):
            pen.ellipse(box(side - 0.25, 0.4, side + 0.25, 0.9), (40, 40, 40), (150, 150, 150))
    elif name == "house":
        pen.rectangle(box(-0.8, -0.15, 0.8, 1), rgb, dark)
        pen.polygon(points((-1, -0.1), (0, -1), (1, -0.1)), rgb, dark)
        pen.rectangle(box(-0.2, 0.4, 0.2, 1), dark)
    elif name == "tree":
        pen.rectangle(box(-0.15, 0.3, 0.15, 1), (110, 75, 45), (70, 50, 30))
        for left, top in ((-0.95, -0.5), (-0.05, -0.5), (-0.5, -1.0)):
            pen.ellipse(box(left, top, left + 1.0, top + 0.95), rgb, dark)
    elif name == "lamp":
        pen.rectangle(box(-0.1, -0.3, 0.1, 1), (90, 90, 90))
        pen.polygon(points((-0.35, -1), (0.35, -1), (0.7, -0.1), (-0.7, -0.1)), rgb, dark)
        pen.rectangle(box(-0.45, 0.85, 0.45, 1), (90, 90, 90))
    elif name == "boat":
        pen.polygon(points((-1, 0.25), (1, 0.25), (0.65, 0.85), (-0.65, 0.85)), rgb, dark)
        pen.rectangle(box(-0.06, -1, 0.06, 0.25), (90, 70, 50))
        pen.polygon(points((0.12, -0.9), (0.8, 0.1), (0.12, 0.1)), rgb, dark)
    else:
        raise ValueError(f"`name` must be one of the things, but is '{name}'.")
