"""What can be said of scenes that are read: descriptions, and questions with their answers."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

from scene_wordings import Claim, Turn, listed, turn
from scene_words import POSITIONS, STEPS

Graph = dict[str, Any]
ORDINALS = ("first", "second", "third", "fourth", "fifth")


def descriptions(graph: Graph, draw: Random, held: bool) -> Iterator[Turn]:
    """What the picture shows decides on the form, the question on the order."""
    text, claims = KINDS[graph["kind"]][1](graph)
    yield turn(draw, "describe", held, text, claims)
    if graph["kind"] in ("menu", "timetable"):
        text, claims = rows_backwards(graph)
        yield turn(draw, "describe_back", held, text, claims)


def describe_tag(graph: Graph) -> tuple[str, list[Claim]]:
    item, price, colour = graph["item"], graph["price"], graph["colour"]
    whole, cents = price.split(".")
    forms = {
        "yellow": f"A yellow price tag: {item} for {price}.",
        "white": f"The picture shows a white price tag with two lines. Above it reads {item}, below {price}.",
        "pink": f"A pink tag says that {item} costs {price}.",
        "orange": f"This orange tag is for {item}; the price is {price}.",
    }
    level = "cheap" if int(whole) < 5 else "neither cheap nor dear" if int(whole) < 15 else "dear"
    text = f"{forms[colour]} So one {item} is {whole} euros and {cents} cents, which is {level}. {spelling(item)}"
    return text, [(colour, "tag"), (item,), (price,), (level,)]


def spelling(word: str) -> str:
    """The ends of a word."""
    return f"The word {word} begins with {word[0]} and ends with {word[-1]}."


def describe_sign(graph: Graph) -> tuple[str, list[Claim]]:
    lines, colour = graph["lines"], graph["colour"]
    if len(lines) == 1:
        body = f"It has one line, which reads {lines[0]}."
    else:
        body = " ".join(f"The {ORDINALS[i]} line reads {line}." for i, line in enumerate(lines))
    forms = {
        "yellow": "A yellow sign stands here.",
        "white": "This is a white sign on a post.",
        "pink": "You see a pink sign.",
        "orange": "An orange sign.",
        "red": "The picture shows a red sign.",
        "green": "There is a green sign on a post.",
        "blue": "A blue sign is on a post.",
        "purple": "On a post there is a purple sign.",
        "brown": "I see one brown sign.",
        "black": "Here you read a black sign.",
    }
    letters = " ".join(spelling(line) for line in lines)
    return f"{forms[colour]} {body} {letters}", [(colour, "sign"), *((line,) for line in lines)]


def describe_clock(graph: Graph) -> tuple[str, list[Claim]]:
    hour, minute = map(int, graph["time"].split(":"))
    colour, time = graph["colour"], graph["time"]
    to_next = f"{60 - minute} minutes before" if minute > 30 else f"{minute} minutes after"
    near = (hour + 1 if minute > 30 else hour) % (12 if graph["hands"] else 24)
    near = near or (12 if graph["hands"] else 0)
    if graph["hands"]:
        hands = {0: "straight up", 15: "to the right", 30: "straight down", 45: "to the left"}[minute]
        text = f"A round clock with a {colour} rim and two hands. The long hand points {hands}. It is {time}"
    else:
        day = ("night", "morning", "afternoon", "evening")[hour // 6]
        begin = {
            "red": "The picture shows a red clock with digits",
            "green": "There is a green clock with digits",
            "blue": "A blue clock without hands",
            "purple": "Here is a purple clock with digits",
            "brown": "This clock is brown and has no hands",
            "black": "You see a black clock with digits",
        }[colour]
        text = f"{begin}. It reads {time}, in the {day}"
    return f"{text}, which is {to_next} {near}.", [(colour,), (time,)]


def describe_ticket(graph: Graph) -> tuple[str, list[Claim]]:
    start, end, time, seat, price = (graph[name] for name in ("start", "end", "time", "seat", "price"))
    hour = int(time[:2])
    if hour < 8:
        text = f"This is an early ticket from {start} to {end}."
        text = f"{text} It leaves at {time}, the seat is {seat}, and it costs {price}."
    elif hour < 16:
        text = f"With this ticket you leave {start} at {time} and go to {end}."
        text = f"{text} The price is {price} for seat {seat}."
    else:
        text = f"A late ticket for {price}: seat {seat}, from {start}, at {time}, to {end}."
    more = f"The lines are FROM {start}; TO {end}; TIME {time}; SEAT {seat}; PRICE {price}."
    return f"{text} {more}", [("FROM", start), ("TO", end), ("TIME", time), ("SEAT", str(seat)), ("PRICE", price)]


def describe_rows(graph: Graph) -> tuple[str, list[Claim]]:
    """Menus and timetables: the title decides on the form."""
    rows, title = graph["rows"], graph["title"]
    menu = graph["kind"] == "menu"
    form = len(title) % 3
    what = "menu" if menu else "timetable"
    if form == 0:
        lines = [f"{a} costs {b}" if menu else f"at {a} to {b}" for a, b in rows]
        text = f"This is a {what} with the title {title}. It has {len(rows)} lines: {'; '.join(lines)}."
    elif form == 1:
        lines = [f"The {ORDINALS[i]} line says {a} for {b}." for i, (a, b) in enumerate(rows)]
        begin = (f"Under {title} this {what} has", f"You read {title} above a {what} of")[len(rows) % 2]
        text = f"{begin} {len(rows)} lines. {' '.join(lines)}"
    else:
        lines = [f"{a} {b}" for a, b in rows]
        text = f"A {what}, {title}, with {len(rows)} lines. From top to bottom they are {', '.join(lines)}."
    claims: list[Claim] = [(title,), *((a, b) for a, b in rows)]
    if menu:
        cheap, dear = (pick(rows, key=lambda row: float(row[1])) for pick in (min, max))
        text += f" The cheapest is {cheap[0]}, the dearest is {dear[0]}."
        claims += [("cheapest", cheap[0]), ("dearest", dear[0])]
    else:
        text += f" The first leaves at {rows[0][0]}, the last at {rows[-1][0]}."
        claims += [("first", rows[0][0]), ("last", rows[-1][0])]
    return text, claims


def rows_backwards(graph: Graph) -> tuple[str, list[Claim]]:
    """From the last line up."""
    rows = graph["rows"][::-1]
    lines = [f"{a} {b}" for a, b in rows]
    text = f"From bottom to top the {graph['kind']} has {'; '.join(lines)}. The title is {graph['title']}."
    return text, [*((a, b) for a, b in rows), (graph["title"],)]


def describe_thermometer(graph: Graph) -> tuple[str, list[Claim]]:
    degrees, colour = graph["degrees"], graph["colour"]
    feel = (
        "freezing"
        if degrees < 0
        else "cold"
        if degrees < 10
        else "mild"
        if degrees < 20
        else "warm"
        if degrees < 30
        else "hot"
    )
    below = degrees // 10 * 10
    begin = {
        "red": "The picture shows a thermometer with a red column",
        "blue": "A thermometer with a blue column",
        "green": "This thermometer has a green column",
    }[colour]
    text = f"{begin}. The marks go from -10 to 40."
    level = f"at the mark {below}" if degrees == below else f"between {below} and {below + 10}"
    return f"{text} The column ends {level}. It shows {degrees} degrees, which is {feel}.", [
        (colour, "column"),
        (str(degrees), "degrees"),
        (feel,),
    ]


def legs(path: list[int]) -> list[str]:
    """ "right", "down", ...: the steps of a route."""
    names = {down * 3 + right: name for name, (down, right) in STEPS.items()}
    return [names[b - a] for a, b in itertools.pairwise(path)]


def describe_map(graph: Graph) -> tuple[str, list[Claim]]:
    start, end = " ".join(graph["start"]), " ".join(graph["end"])
    path, route = graph["path"], graph["route"]
    steps = legs(path)
    stations = [POSITIONS[place] for place in path]
    begin = {
        "red": f"The picture shows a map with a red route of {len(steps)} steps.",
        "green": f"On this map a green route goes {len(steps)} steps.",
        "blue": f"A map: the blue route has {len(steps)} steps.",
        "purple": f"You see a purple route of {len(steps)} steps on a map.",
    }[route]
    way = f"It goes {', then '.join(steps)}. By way of the {listed(stations[1:-1])}"
    text = f"{begin} It starts in the {stations[0]} at the {start}. {way} it ends in the {stations[-1]} at the {end}."
    return text, [(route, "route"), (stations[0], start), (stations[-1], end), *((step,) for step in steps)]


KINDS = {  # what it is, and how it is described
    "tag": ("a price tag", describe_tag),
    "sign": ("a sign", describe_sign),
    "clock": ("a clock", describe_clock),
    "ticket": ("a ticket", describe_ticket),
    "timetable": ("a timetable", describe_rows),
    "menu": ("a menu", describe_rows),
    "thermometer": ("a thermometer", describe_thermometer),
    "map": ("a map", describe_map),
}


def questions(graph: Graph, draw: Random, held: bool) -> Iterator[Turn]:
    """All that is asked of a scene that is read, in no order."""
    kind = graph["kind"]
    yield turn(draw, "kind", held, KINDS[kind][0])
    if kind == "tag":
        yield turn(draw, "word", held, graph["item"], where="the first line")
        yield turn(draw, "price", held, graph["price"], where="the second line")
        yield turn(draw, "price_of", held, graph["price"], item=graph["item"])
        yield turn(draw, "colour", held, graph["colour"], thing="tag")
    elif kind == "sign":
        for number, line in enumerate(graph["lines"]):
            yield turn(draw, "word", held, line, where=f"the {ORDINALS[number]} line")
        yield turn(draw, "word", held, " ".join(graph["lines"]), where="the sign")
        yield turn(draw, "colour", held, graph["colour"], thing="sign")
    elif kind == "clock":
        task = "clock" if graph["hands"] else "time"
        if graph["hands"]:
            yield turn(draw, task, held, graph["time"])
        else:
            yield turn(draw, task, held, graph["time"], where="the clock")
            yield turn(draw, "clock", held, graph["time"])
        yield turn(draw, "colour", held, graph["colour"], thing="clock")
    elif kind == "ticket":
        yield turn(draw, "word", held, graph["start"], where="the first line after FROM")
        yield turn(draw, "word", held, graph["end"], where="the second line after TO")
        yield turn(draw, "time", held, graph["time"], where="the third line")
        yield turn(draw, "number", held, str(graph["seat"]))
        yield turn(draw, "price", held, graph["price"], where="the fifth line")
        yield turn(draw, "time_of", held, graph["time"], town=graph["end"])
        yield turn(draw, "price_of", held, graph["price"], item=graph["end"])
    elif kind in ("menu", "timetable"):
        yield turn(draw, "word", held, graph["title"], where="the title")
        menu = kind == "menu"
        for number, (first, second) in enumerate(graph["rows"]):
            line = f"the {ORDINALS[number]} line"
            word, value = (first, second) if menu else (second, first)
            yield turn(draw, "word", held, word, where=line)
            yield turn(draw, "price" if menu else "time", held, value, where=line)
            if menu:
                yield turn(draw, "price_of", held, value, item=word)
                yield turn(draw, "price_of", held, value, item=word)  # the hardest: asked twice
                yield turn(draw, "item_of", held, word, price=value)
            else:
                yield turn(draw, "time_of", held, value, town=word)
                yield turn(draw, "time_of", held, value, town=word)
                yield turn(draw, "town_of", held, word, time=value)
    elif kind == "thermometer":
        yield turn(draw, "degrees", held, str(graph["degrees"]))
        yield turn(draw, "colour", held, graph["colour"], thing="column")
    elif kind == "map":
        yield turn(draw, "route", held, ", then ".join(legs(graph["path"])))
        yield turn(draw, "colour", held, graph["route"], thing="route")
        for end, station in (("start", graph["path"][0]), ("end", graph["path"][-1])):
            yield turn(draw, "where", held, POSITIONS[station], thing=" ".join(graph[end]))
            yield turn(draw, "position", held, f"the {' '.join(graph[end])}", place=POSITIONS[station])
