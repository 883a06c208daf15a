"""What can be said of rooms and streets: descriptions, and questions with their answers."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from scene_wordings import Claim, Turn, listed, turn
from scene_words import COLOURS, COLUMNS, POSITIONS, ROOM_THINGS, ROWS, STREET_THINGS, article

Graph = dict[str, Any]
Thing = dict[str, Any]
SIDES = {"to the left of": -1, "to the right of": 1, "above": -3, "below": 3}
PLURALS = {"box": "boxes", "cross": "crosses", "bus": "buses"}


def plural(thing: str) -> str:
    return PLURALS.get(thing, f"{thing}s")


def full(one: Thing) -> str:
    """ "large red star" """
    return f"{one['size']} {one['colour']} {one['thing']}"


def place(one: Thing) -> str:
    return POSITIONS[one["place"]]


def beside(graph: Graph, one: Thing, side: str) -> Thing | None:
    """What stands directly to a side of it, if anything does."""
    column = one["place"] % 3
    if (side == "to the left of" and column == 0) or (side == "to the right of" and column == 2):
        return None
    wanted = one["place"] + SIDES[side]
    return next((other for other in graph["objects"] if other["place"] == wanted), None)


def single(graph: Graph, one: Thing) -> str | None:
    """The shortest name that means this object alone: "star", "red star", "large red star"; None where none does."""
    for name in ("{thing}", "{colour} {thing}", "{size} {colour} {thing}"):
        called = name.format(**one)
        if sum(name.format(**other) == called for other in graph["objects"]) == 1:
            return called
    return None


def by_rows(objects: Sequence[Thing]) -> str:
    """How many in each row: what a total is added up from."""
    counts = [sum(one["place"] // 3 == row for one in objects) for row in range(3)]
    return f"top row {counts[0]}, middle row {counts[1]}, bottom row {counts[2]}"


def descriptions(graph: Graph, draw: Random, held: bool) -> Iterator[Turn]:
    """The wall's colour decides on the form, the question on the order."""
    text, claims = describe(graph)
    yield turn(draw, "describe", held, text, claims)
    text, claims = backwards(graph)
    yield turn(draw, "describe_back", held, text, claims)


def describe(graph: Graph) -> tuple[str, list[Claim]]:
    """The description and its claims."""
    objects, wall = graph["objects"], graph["wall"]
    claims: list[Claim] = [(one["size"], one["colour"], one["thing"], place(one)) for one in objects]
    what = f"a room with {wall} walls" if graph["kind"] == "room" else f"a street under {article(wall)} sky"
    number = f"{len(objects)} object{'s' if len(objects) > 1 else ''}"
    if wall == "cream":
        parts = [f"{article(full(one))} in the {place(one)}" for one in objects]
        begin = ("This is", "I see", "We look at")[len(objects) % 3]
        text = f"{begin} {what}. It holds {number}: {', '.join(parts)}."
    elif wall == "grey":
        parts = [f"In the {place(one)} there is {article(full(one))}." for one in objects]
        begin = ("The picture shows", "In this picture there is")[len(objects) % 2]
        text = f"{begin} {what}. {' '.join(parts)} That makes {number}."
    elif wall == "azure":
        claims, lines = [], []
        for row, name in enumerate(ROWS):
            here = [one for one in objects if one["place"] // 3 == row]
            claims += [(name, COLUMNS[one["place"] % 3], one["size"], one["colour"], one["thing"]) for one in here]
            if here:
                lines += [f"{name} {COLUMNS[one['place'] % 3]} {article(full(one))}" for one in here]
            else:
                lines.append(f"{name} nothing")
        text = f"Row by row, {what}: {'; '.join(lines)}. There are {by_rows(objects)}: {number}."
    elif wall == "mint":
        lines = []
        for size in ("large", "small"):
            here = [f"{article(full(one))} in the {place(one)}" for one in objects if one["size"] == size]
            lines.append(f"{size.capitalize()} objects first: {', '.join(here)}." if here and size == "large" else "")
            lines[-1] = lines[-1] or (
                f"{size.capitalize()} ones: {', '.join(here)}." if here else f"Nothing is {size}."
            )
        text = f"Here is {what} with {number}. {' '.join(lines)}"
    else:
        ordered = sorted(objects, key=lambda one: (one["place"] % 3, one["place"] // 3))
        parts = [f"{article(full(one))} stands in the {place(one)}" for one in ordered]
        text = f"You see {what}. From left to right, {', '.join(parts)}."
    more, extra = relations(graph)
    if len(objects) < 4:
        empty = [name for index, name in enumerate(POSITIONS) if index not in {one["place"] for one in objects}]
        more = f"{more} The {listed(empty)} are empty.".strip()
    return f"{text} {more}".strip(), claims + extra


def backwards(graph: Graph) -> tuple[str, list[Claim]]:
    """From bottom to top."""
    ordered = graph["objects"][::-1]
    parts = [f"{article(full(one))} in the {place(one)}" for one in ordered]
    name = "room" if graph["kind"] == "room" else "street"
    text = f"From bottom to top the {name} has {'; '.join(parts)}. {relations(graph)[0]}".strip()
    claims: list[Claim] = [(one["size"], one["colour"], one["thing"], place(one)) for one in ordered]
    return text, claims + relations(graph)[1]


def relations(graph: Graph) -> tuple[str, list[Claim]]:
    """Up to three sentences about neighbours, fewer where there is much else to say; the first objects come first."""
    wanted = max(0, min(3, 6 - len(graph["objects"])))
    found: list[str] = []
    claims: list[Claim] = []
    for one in graph["objects"]:
        for side in ("to the left of", "above"):
            for other in graph["objects"]:
                if len(found) < wanted and beside(graph, other, side) is one:
                    left, right = single(graph, one), single(graph, other)
                    if left and right:
                        found.append(f"The {left} is {side} the {right}.")
                        claims.append((left, side, right))
    return " ".join(found), claims


def questions(graph: Graph, draw: Random, held: bool) -> Iterator[Turn]:
    """Many more than a row of training takes, in no order."""
    objects = graph["objects"]
    kinds = ROOM_THINGS if graph["kind"] == "room" else STREET_THINGS
    yield turn(draw, "kind", held, "a room" if graph["kind"] == "room" else "a street")
    for one in objects:
        name = single(graph, one)
        if name is not None:
            yield turn(draw, "where", held, place(one), thing=name)
            near = [side for side in SIDES if beside(graph, one, side)]
            side = draw.choice(near if near and draw.random() < 0.75 else list(SIDES))
            other = beside(graph, one, side)
            yield turn(draw, "relation", held, article(full(other)) if other else "nothing", side=side, thing=name)
        if sum(other["thing"] == one["thing"] for other in objects) == 1:
            yield turn(draw, "colour", held, one["colour"], thing=one["thing"])
            yield turn(draw, "size", held, one["size"], thing=one["thing"])
        if sum(other["colour"] == one["colour"] for other in objects) == 1:
            yield turn(draw, "shape", held, one["thing"], colour=one["colour"])
    by_place = {one["place"]: one for one in objects}
    for index in range(9):
        one = by_place.get(index)
        if one is not None or draw.random() < 0.3:
            yield turn(draw, "position", held, article(full(one)) if one else "nothing", place=POSITIONS[index])
    yield turn(draw, "count", held, str(len(objects)), things="objects", rows=by_rows(objects))
    named = sorted({one["thing"] for one in objects})
    for thing in [*named, draw.choice(kinds)]:
        here = [one for one in objects if one["thing"] == thing]
        yield turn(draw, "count", held, str(len(here)), things=plural(thing), rows=by_rows(here))
    for colour in {one["colour"]: None for one in objects}:
        here = [one for one in objects if one["colour"] == colour]
        if len(here) > 1:
            yield turn(draw, "count", held, str(len(here)), things=f"{colour} objects", rows=by_rows(here))
    one = draw.choice(objects)
    yield turn(draw, "yes_no", held, "yes", a_thing=article(f"{one['colour']} {one['thing']}"))
    shown = {(one["colour"], one["thing"]) for one in objects}
    tint, thing = draw.choice(list(COLOURS)), draw.choice([one["thing"], draw.choice(kinds)])
    yield turn(draw, "yes_no", held, "yes" if (tint, thing) in shown else "no", a_thing=article(f"{tint} {thing}"))
