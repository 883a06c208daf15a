"""Draws pictures unlike the drawn scenes, in many styles: what confidence must be low for.

python data/build/other_pictures.py --out data/other_pictures      # the same seed gives the same files

`dev` has the styles that a confidence is fitted to, `test` others, which the fit does not see. Nothing in them is drawn
by the code that draws scenes, and nothing was photographed. Each file is {split}/{style}/{number}.png.
"""

import argparse
import colorsys
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import scene_fonts
from PIL import Image, ImageDraw, ImageFilter

SIDES = (96, 480)  # pixels, the shortest and the longest
WORDS = (
    "the", "of", "and", "that", "it", "was", "for", "on", "are", "as", "with", "they", "be", "this", "from", "have",
)  # fmt: skip
Rgb = tuple[int, int, int]
Pen = ImageDraw.ImageDraw


def colour(draw: Random) -> Rgb:
    """Any, bright and pure ones as often as dull ones."""
    rgb = colorsys.hsv_to_rgb(draw.random(), draw.random() ** 0.5, draw.random() ** 0.5)
    return (int(255 * rgb[0]), int(255 * rgb[1]), int(255 * rgb[2]))


def blank(draw: Random) -> tuple[Image.Image, Pen, Rgb]:
    """A canvas of any size, half of them white, with a pen and an ink that can be seen on it."""
    size = draw.randint(*SIDES), draw.randint(*SIDES)
    ground = (255, 255, 255) if draw.random() < 0.5 else colour(draw)
    ink = colour(draw)
    while sum(abs(a - b) for a, b in zip(ink, ground, strict=True)) < 150:
        ink = colour(draw)
    image = Image.new("RGB", size, ground)
    return image, ImageDraw.Draw(image), ink


def box(draw: Random, image: Image.Image, least: float = 0.3, most: float = 0.9) -> tuple[float, float, float, float]:
    """A square of a share of the picture's shorter side, wherever it has room."""
    side = draw.uniform(least, most) * min(image.size)
    left, top = draw.uniform(0, image.width - side), draw.uniform(0, image.height - side)
    return left, top, left + side, top + side


def polygon(frame: Sequence[float], corners: int, turn: float, inner: float = 1.0) -> list[tuple[float, float]]:
    """Corners on a circle in a square; every second one nearer to the middle for a star."""
    x, y, radius = (frame[0] + frame[2]) / 2, (frame[1] + frame[3]) / 2, (frame[2] - frame[0]) / 2
    points = []
    for corner in range(corners):
        reach = radius * (inner if corner % 2 else 1)
        angle = turn + 2 * math.pi * corner / corners
        points.append((x + reach * math.sin(angle), y - reach * math.cos(angle)))
    return points


def outlines(draw: Random) -> Image.Image:
    """Empty polygons in a thin or a thick line."""
    image, pen, ink = blank(draw)
    for _ in range(draw.randint(1, 5)):
        points = polygon(box(draw, image), draw.randint(3, 9), draw.uniform(0, 6))
        pen.line([*points, points[0]], ink, draw.randint(1, 8))
    return image


def bars(draw: Random) -> Image.Image:
    """A bar chart with its axes."""
    image, pen, ink = blank(draw)
    count, fill = draw.randint(3, 9), colour(draw)
    step, floor = image.width * 0.8 / count, image.height * 0.88
    for bar in range(count):
        left = image.width * 0.12 + bar * step
        top = floor - draw.uniform(0.05, 0.75) * image.height
        pen.rectangle((left, top, left + step * 0.7, floor), colour(draw) if draw.random() < 0.3 else fill)
    pen.line((image.width * 0.1, image.height * 0.06, image.width * 0.1, floor, image.width * 0.95, floor), ink, 2)
    return image


def scribble(draw: Random) -> Image.Image:
    """A pen that wanders."""
    image, pen, ink = blank(draw)
    for _ in range(draw.randint(1, 4)):
        x, y, angle = draw.uniform(0, image.width), draw.uniform(0, image.height), draw.uniform(0, 6)
        points, bend = [(x, y)], 0.0
        for _ in range(draw.randint(40, 300)):
            bend = 0.8 * bend + draw.gauss(0, 0.15)
            angle += bend
            x, y = x + 4 * math.cos(angle), y + 4 * math.sin(angle)
            points.append((x, y))
        pen.line(points, ink, draw.randint(1, 5))
    return image


def squares(draw: Random) -> Image.Image:
    """A board of squares: of two colours in turn, or of any."""
    size, across = (draw.randint(*SIDES), draw.randint(*SIDES)), draw.randint(2, 14)
    down = max(round(across * size[1] / size[0]), 1)
    board = Image.new("RGB", (across, down))
    two = [colour(draw), colour(draw)] if draw.random() < 0.5 else None
    for x in range(across):
        for y in range(down):
            board.putpixel((x, y), colour(draw) if two is None else two[(x + y) % 2])
    return board.resize(size, Image.Resampling.NEAREST)


def stripes(draw: Random) -> Image.Image:
    """A flag: stripes, level, upright or slanting, some with a cross or a disc."""
    image, pen, ink = blank(draw)
    count, slant = draw.randint(2, 9), draw.choice((0.0, 0.0, 0.5, -0.5))
    upright = draw.random() < 0.5
    tints = [colour(draw) for _ in range(draw.randint(2, 4))]
    reach = image.width if upright else image.height
    other = image.height if upright else image.width
    for stripe in range(-count, 2 * count):
        begin, end, shift = stripe * reach / count, (stripe + 1) * reach / count, slant * other
        corners = [(begin, 0), (end, 0), (end + shift, other), (begin + shift, other)]
        pen.polygon(corners if upright else [(y, x) for x, y in corners], tints[stripe % len(tints)])
    if draw.random() < 0.4:
        pen.ellipse(box(draw, image, 0.2, 0.5), ink)
    return image


def hills(draw: Random) -> Image.Image:
    """A sky that fades, a sun, and hills one behind another."""
    size = draw.randint(*SIDES), draw.randint(*SIDES)
    above, below = np.array(colour(draw)), np.array(colour(draw))
    share = np.linspace(0, 1, size[1])[:, None, None]
    sky = np.broadcast_to(above * (1 - share) + below * share, (size[1], size[0], 3))
    image = Image.fromarray(sky.astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse(box(draw, image, 0.1, 0.25), (255, draw.randint(180, 250), draw.randint(60, 180)))
    for hill in range(draw.randint(2, 5)):
        height, wave, phase = (0.4 + 0.13 * hill) * size[1], draw.uniform(1, 4), draw.uniform(0, 6)
        edge = [
            (x, height + 0.1 * size[1] * math.sin(phase + wave * 2 * math.pi * x / size[0]))
            for x in range(0, size[0] + 4, 4)
        ]
        pen.polygon([(0, size[1]), *edge, (size[0], size[1])], colour(draw))
    return image.filter(ImageFilter.GaussianBlur(draw.uniform(0, 1.5)))


def page(draw: Random) -> Image.Image:
    """Lines of small letters, as in a book."""
    image, pen, ink = blank(draw)
    size = draw.randint(7, 22)
    face = scene_fonts.font(draw.choice(scene_fonts.TRAIN), size)
    y = image.height * 0.06
    while y < image.height * 0.93 - size:
        line = " ".join(draw.choice(WORDS) for _ in range(60))
        room = image.width * (0.88 if draw.random() < 0.85 else draw.uniform(0.2, 0.8))
        while line and face.getlength(line) > room:
            line = line[:-1]
        pen.text((image.width * 0.06, y), line, font=face, fill=ink)
        y += size * 1.35
    return image


def disc(draw: Random) -> Image.Image:
    """One filled shape on a plain ground: a circle, a triangle, a square, a star."""
    image, pen, ink = blank(draw)
    frame, corners = box(draw, image), draw.choice((0, 0, 3, 4, 10))
    if corners:
        pen.polygon(polygon(frame, corners, draw.uniform(0, 6), 0.45 if corners == 10 else 1), ink)
    else:
        pen.ellipse(frame, ink, colour(draw), draw.randint(0, 6))
    return image


def face(draw: Random) -> Image.Image:
    """A head with eyes and a mouth."""
    image, pen, ink = blank(draw)
    left, top, right, bottom = frame = box(draw, image, 0.5)
    side, line = right - left, draw.randint(1, 6)
    pen.ellipse(frame, colour(draw) if draw.random() < 0.6 else None, ink, line)
    for across in (0.32, 0.68):
        eye, reach = (left + across * side, top + 0.38 * side), side * draw.uniform(0.03, 0.09)
        pen.ellipse((eye[0] - reach, eye[1] - reach, eye[0] + reach, eye[1] + reach), ink)
    pen.arc((left + 0.25 * side, top + 0.4 * side, right - 0.25 * side, bottom - 0.15 * side), 20, 160, ink, line)
    return image


def curves(draw: Random) -> Image.Image:
    """A chart of lines over a grid."""
    image, pen, ink = blank(draw)
    for step in range(1, 6):
        across, down = image.width * step / 6, image.height * step / 6
        pen.line((across, 0, across, image.height), (200, 200, 200))
        pen.line((0, down, image.width, down), (200, 200, 200))
    for _ in range(draw.randint(1, 4)):
        y, points = draw.uniform(0.2, 0.8), []
        for step in range(25):
            y = min(max(y + draw.gauss(0, 0.08), 0.05), 0.95)
            points.append((image.width * step / 24, image.height * y))
        pen.line(points, ink, draw.randint(1, 4))
        ink = colour(draw)
    return image


def pie(draw: Random) -> Image.Image:
    """A circle in sectors."""
    image, pen, _ = blank(draw)
    frame, at = box(draw, image, 0.5), draw.uniform(0, 360)
    shares = [draw.uniform(0.2, 1) for _ in range(draw.randint(2, 7))]
    for part in shares:
        end = at + 360 * part / sum(shares)
        pen.pieslice(frame, at, end, colour(draw))
        at = end
    return image


def rings(draw: Random) -> Image.Image:
    """Circles in one another, or a spiral."""
    image, pen, ink = blank(draw)
    x, y, count = image.width / 2, image.height / 2, draw.randint(3, 12)
    reach, line = min(x, y) * 0.95, draw.randint(1, 5)
    if draw.random() < 0.5:
        for ring in range(count):
            radius = reach * (ring + 1) / count
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), None, ink, line)
    else:
        turns = [step / 40 for step in range(40 * count)]
        radius = [reach * turn / count for turn in turns]
        pen.line(
            [(x + r * math.cos(6.283 * t), y + r * math.sin(6.283 * t)) for r, t in zip(radius, turns, strict=True)],
            ink,
            line,
        )
    return image


def stars(draw: Random) -> Image.Image:
    """Specks on a dark ground."""
    image = Image.new("RGB", (draw.randint(*SIDES), draw.randint(*SIDES)), tuple(draw.randint(0, 50) for _ in "rgb"))
    pen = ImageDraw.Draw(image)
    for _ in range(draw.randint(15, 150)):
        x, y, radius = draw.uniform(0, image.width), draw.uniform(0, image.height), draw.uniform(0.3, 2.5)
        light = draw.randint(120, 255)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), (light, light, draw.randint(120, 255)))
    return image


def cells(draw: Random) -> Image.Image:
    """Points, and around each all that is nearest to it: stained glass, with light from one side."""
    size, count = (draw.randint(*SIDES), draw.randint(*SIDES)), draw.randint(5, 60)
    points = np.array([(draw.uniform(0, size[0]), draw.uniform(0, size[1])) for _ in range(count)])
    tints = np.array([colour(draw) for _ in range(count)])
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    far = (x[..., None] - points[:, 0]) ** 2 + (y[..., None] - points[:, 1]) ** 2
    light = np.clip(1.1 - np.sqrt(far.min(2)) / max(size) * draw.uniform(0, 4), 0, 1)
    return Image.fromarray((tints[far.argmin(2)] * light[..., None]).astype(np.uint8))


def branches(draw: Random) -> Image.Image:
    """A tree that forks."""
    image, pen, ink = blank(draw)
    spread, shorter = draw.uniform(0.3, 0.7), draw.uniform(0.65, 0.78)
    waiting = [(image.width / 2, image.height * 0.97, 0.0, image.height * 0.24, 7)]
    while waiting:
        x, y, angle, length, left = waiting.pop()
        to = x + length * math.sin(angle), y - length * math.cos(angle)
        pen.line((x, y, *to), ink, max(left, 1))
        if left:
            for side in (-spread, spread):
                waiting.append((*to, angle + side + draw.gauss(0, 0.1), length * shorter, left - 1))
    return image


def cottage(draw: Random) -> Image.Image:
    """As a child draws it: a house with a roof, a door, windows, and a sun in the corner."""
    image, pen, ink = blank(draw)
    wide, high, line = image.width, image.height, draw.randint(2, 6)
    left, right, top, floor = 0.25 * wide, 0.7 * wide, 0.5 * high, 0.9 * high
    pen.rectangle((left, top, right, floor), colour(draw) if draw.random() < 0.5 else None, ink, line)
    pen.line((left, top, (left + right) / 2, 0.22 * high, right, top), ink, line)
    pen.rectangle((0.42 * wide, 0.68 * high, 0.52 * wide, floor), None, ink, line)
    for x in (0.3, 0.57):
        pen.rectangle((x * wide, 0.56 * high, (x + 0.09) * wide, 0.65 * high), None, ink, line)
    pen.ellipse((0.78 * wide, 0.05 * high, 0.95 * wide, 0.05 * high + 0.17 * wide), (255, 210, 0))
    for ray in range(8):
        angle, x, y = ray * math.pi / 4, 0.865 * wide, 0.05 * high + 0.085 * wide
        near, far = 0.1 * wide, 0.15 * wide
        ends = [(x + r * math.cos(angle), y + r * math.sin(angle)) for r in (near, far)]
        pen.line(ends, (255, 180, 0), line)
    pen.line((0, floor, wide, floor), (40, 150, 40), line)
    return image


STYLES: dict[str, dict[str, Callable[[Random], Image.Image]]] = {
    "dev": {
        "outlines": outlines, "bars": bars, "scribble": scribble, "squares": squares, "stripes": stripes,
        "hills": hills, "page": page,
    },
    "test": {
        "disc": disc, "face": face, "curves": curves, "pie": pie, "rings": rings, "stars": stars, "cells": cells,
        "branches": branches, "cottage": cottage,
    },
}  # fmt: skip


def main() -> int:
    """Exit code: 0, or 2 where the fonts are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=60, help="pictures of each style (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if missing := scene_fonts.missing_fonts():
        print(missing, file=sys.stderr)
        return 2
    for split, styles in STYLES.items():
        for name, style in styles.items():
            folder = arguments.out / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(arguments.each):
                style(Random(f"{arguments.seed} {name} {number}")).save(folder / f"{number:04d}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
