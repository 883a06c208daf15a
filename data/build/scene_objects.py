"""Rooms and streets: what stands in the nine places of a picture, and how it is drawn.

A scene graph is a plain dictionary: kind, wall (which also names a street's sky), and objects, each with thing, colour,
size and place (0 to 8, row by row). No two objects share a place.
"""

from random import Random
from typing import Any

from scene_canvas import SIDE, Canvas, shade
from scene_words import COLOURS, ROOM_THINGS, SIZES, STREET_THINGS, WALLS

Graph = dict[str, Any]
THIRD = SIDE / 3
PAVINGS = ((120, 120, 125), (150, 140, 130), (105, 110, 105))


def draw_graph(kind: str, draw: Random) -> Graph:
    """A room or a street. In a third of them one thing is repeated up to nine times, to be counted."""
    things = list(ROOM_THINGS if kind == "room" else STREET_THINGS)
    colours = list(COLOURS)
    counted = draw.random() < 0.4
    places = list(range(9))
    draw.shuffle(places)
    objects = []
    if counted:
        thing, colour = draw.choice(things), draw.choice(colours)
        same_colour = draw.random() < 0.5
        count = draw.randint(1, 9)
        others = draw.randint(0, min(3, 9 - count))
        for number in range(count + others):
            if number < count:
                tint = colour if same_colour else draw.choice(colours)
                objects.append(_object(draw, thing, tint, places[number]))
            else:
                objects.append(_object(draw, draw.choice(things), draw.choice(colours), places[number]))
    else:
        for place in places[: draw.randint(2, 6)]:
            objects.append(_object(draw, draw.choice(things), draw.choice(colours), place))
    objects.sort(key=lambda one: one["place"])
    return {"kind": kind, "wall": draw.choice(list(WALLS)), "objects": objects}


def _object(draw: Random, thing: str, colour: str, place: int) -> dict[str, Any]:
    return {"thing": thing, "colour": colour, "size": draw.choice(SIZES), "place": place}


def draw_picture(graph: Graph, draw: Random) -> Canvas:
    """Each object in its place, a little off the middle of it."""
    wall = shade(WALLS[graph["wall"]], draw, 7)
    canvas = Canvas(wall, draw)
    if graph["kind"] == "room":
        _room(canvas, draw)
    else:
        _street(canvas, draw)
    for one in graph["objects"]:
        radius = draw.uniform(7.5, 9.5) if one["size"] == "small" else draw.uniform(14.5, 17.5)
        slack = THIRD / 2 - radius - 2
        x = (one["place"] % 3 + 0.5) * THIRD + draw.uniform(-slack, slack) * 0.7
        y = (one["place"] // 3 + 0.5) * THIRD + draw.uniform(-slack, slack) * 0.7
        canvas.thing(one["thing"], one["colour"], (x, y), radius)
    return canvas


def _room(canvas: Canvas, draw: Random) -> None:
    """Shelves, or a floor."""
    dark = tuple(int(value * 0.86) for value in canvas.background)
    line = tuple(int(value * 0.72) for value in canvas.background)
    if draw.random() < 0.5:
        for row in (1, 2, 3):
            y = row * THIRD - draw.uniform(0, 2)
            canvas.pen.line((0, y, SIDE, y), line, 2)
    else:
        y = draw.uniform(92, 118)
        canvas.pen.rectangle((0, y, SIDE, SIDE), dark)
        canvas.pen.line((0, y, SIDE, y), line, 2)


def _street(canvas: Canvas, draw: Random) -> None:
    """A paving below the sky, with lanes."""
    paving = shade(draw.choice(PAVINGS), draw, 8)
    y = draw.uniform(38, 48)
    canvas.pen.rectangle((0, y, SIDE, SIDE), paving)
    light = tuple(min(255, value + 50) for value in paving)
    for lane in (2 * THIRD + draw.uniform(-2, 2),):
        for x in range(int(draw.uniform(-14, 0)), SIDE, 22):
            canvas.pen.line((x, lane, x + 11, lane), light, 2)
