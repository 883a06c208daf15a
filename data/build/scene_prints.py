"""Scenes that are read: price tags, signs, clocks, tickets, timetables, menus, thermometers and maps.

Each kind has a function that draws a scene graph, a plain dictionary whose "kind" names it, and one that draws its
picture.
"""

import math
from random import Random
from typing import Any

import scene_words as words
from scene_canvas import SIDE, Canvas, Rgb, shade
from scene_fonts import fitting, width
from scene_words import COLOURS, WALLS

Graph = dict[str, Any]
PAPERS: tuple[Rgb, ...] = ((250, 250, 246), (246, 240, 218), (228, 238, 246), (236, 246, 230), (248, 230, 232))
INKS: tuple[Rgb, ...] = ((20, 20, 25), (30, 40, 110), (110, 20, 25), (20, 75, 40), (70, 40, 90))
LIGHT, DARK = ("yellow", "white", "pink", "orange"), ("red", "green", "blue", "purple", "brown", "black")
DEGREES = range(-10, 41, 2)


def tag_graph(draw: Random) -> Graph:
    return {
        "kind": "tag",
        "colour": draw.choice(LIGHT),
        "item": words.printed(draw, words.GOODS, 1)[0],
        "price": words.price(draw),
    }


def sign_graph(draw: Random) -> Graph:
    count = draw.choice((1, 1, 2, 2, 3))
    return {
        "kind": "sign",
        "colour": draw.choice((*LIGHT, *DARK)),
        "lines": words.printed(draw, words.SIGNS, count, 0.3),
    }


def clock_graph(draw: Random) -> Graph:
    if draw.random() < 0.6:
        return {"kind": "clock", "hands": False, "colour": draw.choice(DARK), "time": words.time_of_day(draw)}
    return {
        "kind": "clock",
        "hands": True,
        "colour": draw.choice(DARK),
        "time": f"{draw.randint(1, 12)}:{draw.choice(('00', '15', '30', '45'))}",
    }


def ticket_graph(draw: Random) -> Graph:
    start, end = words.printed(draw, words.TOWNS, 2)
    return {
        "kind": "ticket",
        "start": start,
        "end": end,
        "time": words.time_of_day(draw),
        "seat": draw.randint(1, 99),
        "price": words.price(draw),
    }


def timetable_graph(draw: Random) -> Graph:
    rows = draw.choice((2, 3, 4, 4))
    times = sorted({words.time_of_day(draw) for _ in range(rows)})
    towns = words.printed(draw, words.TOWNS, len(times))
    title = draw.choice(words.BOARD_TITLES)
    return {
        "kind": "timetable",
        "title": title,
        "rows": [[time, town] for time, town in zip(times, towns, strict=True)],
    }


def menu_graph(draw: Random) -> Graph:
    rows = draw.choice((2, 3, 4, 4, 5))
    names = words.printed(draw, draw.choice((words.DISHES, words.DRINKS, words.DISHES + words.DRINKS)), rows)
    prices: list[str] = []
    while len(prices) < rows:
        price = words.price(draw)
        if price not in prices:
            prices.append(price)
    return {
        "kind": "menu",
        "title": draw.choice(words.MENU_TITLES),
        "rows": [[name, price] for name, price in zip(names, prices, strict=True)],
    }


def thermometer_graph(draw: Random) -> Graph:
    return {"kind": "thermometer", "colour": draw.choice(("red", "blue", "green")), "degrees": draw.choice(DEGREES)}


def map_graph(draw: Random) -> Graph:
    """A route over some of nine places, never twice over one, from one thing to another."""
    while True:
        path = [draw.randrange(9)]
        for _ in range(draw.randint(2, 5)):
            near = [place for place in neighbours(path[-1]) if place not in path]
            if not near:
                break
            path.append(draw.choice(near))
        if len(path) > 2:
            break
    start, end = draw.sample(words.ROOM_THINGS, 2)
    return {
        "kind": "map",
        "route": draw.choice(DARK[:4]),
        "path": path,
        "start": [draw.choice(list(COLOURS)), start],
        "end": [draw.choice(list(COLOURS)), end],
    }


def neighbours(place: int) -> list[int]:
    """The places beside, above and below one of nine."""
    row, column = divmod(place, 3)
    return [
        (row + down) * 3 + column + right
        for down, right in words.STEPS.values()
        if 0 <= row + down < 3 and 0 <= column + right < 3
    ]


def paper(canvas: Canvas, draw: Random) -> Rgb:
    """A sheet over most of the picture; returns the ink."""
    left, top = draw.uniform(0, 4), draw.uniform(0, 4)
    sheet = shade(draw.choice(PAPERS), draw, 6)
    canvas.panel(
        (left, top, SIDE - draw.uniform(1, 4), SIDE - draw.uniform(1, 4)), "", sheet, tuple(v // 2 for v in sheet)
    )  # type: ignore[arg-type]
    return draw.choice(INKS)


def centred(canvas: Canvas, y: float, text: str, font: str, size: int, ink: Rgb) -> None:
    """Print in the middle of the line at this height."""
    canvas.text(((SIDE - width(font, size, text)) / 2, y), text, font, size, ink)


def table(canvas: Canvas, draw: Random, title: str, rows: list[list[str]], font: str) -> None:
    """A title over rows of two columns. The right column is flush right where it holds prices."""
    ink = paper(canvas, draw)
    pitch = min(22.0, 96 / len(rows))
    largest = draw.choice((12, 13, 13, 14))
    both = [f"{a}  {b}" for a, b in rows]
    size = min(fitting(font, largest, text, SIDE - 18) for text in both)
    head = fitting(font, draw.choice((14, 15, 16, 17)), title, SIDE - 24)
    x = (SIDE - width(font, head, title)) / 2 if draw.random() < 0.7 else 9.0
    canvas.text((x, draw.uniform(12, 16)), title, font, head, draw.choice(INKS))
    y = draw.uniform(34, 38) + max(0.0, (88 - pitch * len(rows)) * draw.random() * 0.6)
    left, right = draw.uniform(6, 9), SIDE - draw.uniform(6, 9)
    ruled = draw.random() < 0.3
    for first, second in rows:
        canvas.text((left, y), first, font, size, ink)
        begin = right - width(font, size, second)
        if ":" in first:
            begin = min(begin, left + width(font, size, "00:00") + draw.choice((9.0, 9.5)))
        elif draw.random() < 0.25:
            for x in range(int(left + width(font, size, first)) + 4, int(begin) - 3, 5):
                canvas.pen.point((x, y + 4), ink)
        canvas.text((begin, y), second, font, size, ink)
        if ruled:
            canvas.pen.line((left, y + pitch / 2, right, y + pitch / 2), (170, 170, 170))
        y += pitch


def menu_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    canvas = Canvas(shade(draw.choice(list(WALLS.values())), draw), draw)
    table(canvas, draw, graph["title"], graph["rows"], font)
    return canvas


def ticket_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    canvas = Canvas(shade(draw.choice(list(WALLS.values())), draw), draw)
    ink = paper(canvas, draw)
    lines = [
        ("FROM", graph["start"]),
        ("TO", graph["end"]),
        ("TIME", graph["time"]),
        ("SEAT", str(graph["seat"])),
        ("PRICE", graph["price"]),
    ]
    size = min(fitting(font, draw.choice((12, 13, 14)), f"{a}  {b}", SIDE - 16) for a, b in lines)
    left, y = draw.uniform(6, 10), draw.uniform(14, 20)
    aside = max(width(font, size, label) for label, _ in lines) + draw.uniform(7, 10)
    aligned = draw.random() < 0.6
    label_ink = draw.choice((ink, (120, 120, 120)))
    for label, value in lines:
        canvas.text((left, y), label, font, size, label_ink)
        canvas.text((left + (aside if aligned else width(font, size, label) + 8), y), value, font, size, ink)
        y += 22
    return canvas


def tag_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    canvas = Canvas(shade(draw.choice(list(WALLS.values())), draw), draw)
    top, bottom = draw.uniform(14, 30), draw.uniform(98, 114)
    rgb = shade(COLOURS[graph["colour"]], draw)
    canvas.panel((6, top, SIDE - 6, bottom), graph["colour"], rgb, (80, 80, 80), draw.choice((0, 6, 12)))
    canvas.pen.ellipse((12, top + 5, 19, top + 12), canvas.background, (80, 80, 80))
    ink = draw.choice(INKS)
    size = fitting(font, draw.randint(13, 20), graph["item"], 104, 12)
    middle = (top + bottom) / 2
    centred(canvas, middle - draw.uniform(11, 16), graph["item"], font, size, ink)
    size = draw.randint(14, 24)
    centred(canvas, middle + draw.uniform(14, 20), graph["price"], font, size, ink)
    return canvas


def sign_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    canvas = Canvas(shade(draw.choice(list(WALLS.values())), draw), draw)
    lines = graph["lines"]
    half = 14 + 12 * len(lines)
    middle = 64 + draw.uniform(-1, 1) * (54 - half)
    canvas.pen.rectangle((60, middle, 67, SIDE), (110, 110, 115))
    rgb = shade(COLOURS[graph["colour"]], draw)
    light = graph["colour"] in LIGHT
    ink: Rgb = (20, 20, 25) if light else (250, 250, 250)
    canvas.panel((4, middle - half, SIDE - 4, middle + half), graph["colour"], rgb, ink, draw.choice((0, 4, 10)))
    y = middle - 12.5 * (len(lines) - 1)
    size = min(fitting(font, draw.randint(14, 22), line, 108, 12) for line in lines)
    for line in lines:
        centred(canvas, y, line, font, size, ink)
        y += 25
    return canvas


def clock_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    canvas = Canvas(shade(draw.choice(list(WALLS.values())), draw), draw)
    rgb = shade(COLOURS[graph["colour"]], draw, 10)
    if not graph["hands"]:
        size = draw.randint(16, 30)
        wide = width(font, size, graph["time"])
        x, y = draw.uniform(12, SIDE - 12 - wide), draw.uniform(34, 94)
        canvas.panel((x - 8, y - size * 0.8, x + wide + 8, y + size * 0.8), graph["colour"], rgb, (60, 60, 60), 4)
        canvas.text((x, y), graph["time"], font, size, draw.choice(((250, 250, 250), (255, 240, 150), (190, 255, 200))))
        return canvas
    radius = draw.uniform(42, 56)
    x, y = 64 + draw.uniform(-5, 5), 64 + draw.uniform(-5, 5)
    canvas.pen.ellipse((x - radius, y - radius, x + radius, y + radius), (250, 250, 246), rgb, 5)
    hour, minute = map(int, graph["time"].split(":"))
    for number in range(1, 13):
        turn = number * math.pi / 6
        at = (x + math.sin(turn) * radius * 0.76, y - math.cos(turn) * radius * 0.76)
        wide = width(font, 11, str(number))
        canvas.text((at[0] - wide / 2, at[1]), str(number), font, 11, (40, 40, 40))
    for turn, length, thick in (((hour % 12 + minute / 60) / 12, 0.42, 5), (minute / 60, 0.64, 2)):
        turn *= 2 * math.pi
        tip = (x + math.sin(turn) * radius * length, y - math.cos(turn) * radius * length)
        canvas.pen.line((x, y, *tip), (20, 20, 20), thick)
    return canvas


def thermometer_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    """A tube with a mark at every tenth degree, from -10 to 40."""
    canvas = Canvas(shade(draw.choice(list(WALLS.values())), draw), draw)
    x, top, bottom = draw.uniform(42, 84), draw.uniform(9, 13), draw.uniform(100, 104)
    rgb = shade(COLOURS[graph["colour"]], draw, 10)
    step = (bottom - top) / 50
    canvas.pen.rectangle((x - 6, top - 5, x + 6, bottom + 8), (250, 250, 250), (80, 80, 80))
    canvas.pen.ellipse((x - 11, bottom + 2, x + 11, bottom + 22), rgb, (80, 80, 80))
    level = bottom - (graph["degrees"] + 10) * step
    canvas.pen.rectangle((x - 3, level, x + 3, bottom + 8), rgb)
    canvas.tint_pen.rectangle((x - 3, level, x + 3, bottom + 16), list(COLOURS).index(graph["colour"]) + 1)
    side = draw.choice((-1, 1))
    for degrees in range(-10, 41, 10):
        y = bottom - (degrees + 10) * step
        canvas.pen.line((x + side * 6, y, x + side * 12, y), (40, 40, 40))
        label = str(degrees)
        wide = width(font, 11, label)
        canvas.text((x + 15 if side > 0 else x - 15 - wide, y), label, font, 11, (30, 30, 30))
    return canvas


def map_picture(graph: Graph, draw: Random, font: str) -> Canvas:
    """Streets, a thick line along the route, its two ends as things."""
    del font  # nothing is printed on maps
    canvas = Canvas(shade(WALLS[draw.choice(("cream", "mint", "grey"))], draw, 8), draw)
    pitch = draw.uniform(39, 43)
    places = [
        (64 + (place % 3 - 1) * pitch + draw.uniform(-1, 1), 64 + (place // 3 - 1) * pitch + draw.uniform(-1, 1))
        for place in range(9)
    ]
    for place in range(9):
        for other in neighbours(place):
            canvas.pen.line((*places[place], *places[other]), (245, 245, 240), 7)
    rgb = shade(COLOURS[graph["route"]], draw, 10)
    track = [places[place] for place in graph["path"]]
    canvas.pen.line(track, rgb, 4, joint="curve")
    canvas.tint_pen.line(track, list(COLOURS).index(graph["route"]) + 1, 9)
    for place, (colour, thing) in ((graph["path"][0], graph["start"]), (graph["path"][-1], graph["end"])):
        canvas.thing(thing, colour, places[place], draw.uniform(11, 13))
    return canvas


KINDS = {
    "tag": (tag_graph, tag_picture),
    "sign": (sign_graph, sign_picture),
    "clock": (clock_graph, clock_picture),
    "ticket": (ticket_graph, ticket_picture),
    "timetable": (timetable_graph, menu_picture),
    "menu": (menu_graph, menu_picture),
    "thermometer": (thermometer_graph, thermometer_picture),
    "map": (map_graph, map_picture),
}
