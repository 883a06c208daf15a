"""Finds the claims in a text about a drawn scene, and compares them with the scene graph.

It does not depend on how a text was made, so it can check texts of the corpus and of a model.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from scene_words import COLOURS, COLUMNS, POSITIONS, ROWS, STEPS, THINGS

Graph = dict[str, Any]
_SIZE, _COLOUR = r"(?P<size>small|large)", f"(?P<colour>{'|'.join(COLOURS)})"
_THING = f"(?P<thing>{'|'.join(THINGS)})"
_PLACE = f"(?P<place>{'|'.join(sorted(POSITIONS, key=len, reverse=True))})"
_NAME = f"(?:(?:small|large) )?(?:(?:{'|'.join(COLOURS)}) )?(?:{'|'.join(THINGS)})"
_OBJECTS = [
    re.compile(rf"{_SIZE} {_COLOUR} {_THING} (?:stands |is )?in the {_PLACE}\b"),
    re.compile(rf"in the {_PLACE} there is an? {_SIZE} {_COLOUR} {_THING}\b"),
    re.compile(rf"\b(?P<row>{'|'.join(ROWS)}) (?P<column>{'|'.join(COLUMNS)}) an? {_SIZE} {_COLOUR} {_THING}\b"),
]
_RELATION = re.compile(rf"\bthe ({_NAME}) is (to the left of|to the right of|above|below) the ({_NAME})\b")
_SIDES = {"to the left of": (0, -1), "to the right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
_TOTAL = re.compile(r"\b(\d+) objects?\b")
_ROW_COUNTS = re.compile(r"top row (\d+), middle row (\d+), bottom row (\d+)")
_EMPTY = re.compile(rf"\bthe ((?:{'|'.join(POSITIONS)}|, | and )+) are empty\b")
_WORD = re.compile(r"\b[A-Z]{2,}\b")
_VALUE = re.compile(r"\b\d{1,2}(?:\.\d\d|:\d\d)\b")
_CLAUSE = re.compile(r"[.;,](?:\s+|$)")


def false_claims(graph: Graph, text: str) -> tuple[list[str], int]:
    """Return a text's claims that are false of the scene, and the number of all its claims."""
    read = objects if graph["kind"] in ("room", "street") else prints
    claims = list(read(graph, text))
    return [claim for claim, holds in claims if not holds], len(claims)


def called(graph: Graph, name: str) -> list[dict[str, Any]]:
    """List the objects that a name such as "star" or "large red star" fits."""
    words = name.split()
    return [
        one
        for one in graph["objects"]
        if one["thing"] == words[-1] and all(word in (one["size"], one["colour"]) for word in words[:-1])
    ]


def objects(graph: Graph, text: str) -> Iterator[tuple[str, bool]]:
    """Yield (claim, whether it is true) about objects' places, neighbours and number."""
    lower = text.lower()
    for pattern in _OBJECTS:
        for match in pattern.finditer(lower):
            said = match.groupdict()
            place = (
                POSITIONS.index(said["place"])
                if "place" in said
                else ROWS.index(said["row"]) * 3 + COLUMNS.index(said["column"])
            )
            wanted = {"size": said["size"], "colour": said["colour"], "thing": said["thing"], "place": place}
            yield match.group(), wanted in graph["objects"]
    for match in _RELATION.finditer(lower):
        yield match.group(), related(graph, match.group(1), match.group(2), match.group(3))
    for match in _TOTAL.finditer(lower):
        yield match.group(), int(match.group(1)) == len(graph["objects"])
    for match in _EMPTY.finditer(lower):
        named = [name for name in re.split(", | and ", match.group(1)) if name]
        taken = {POSITIONS[one["place"]] for one in graph["objects"]}
        yield match.group(), not taken & set(named) and len(named) + len(taken) == 9


def related(graph: Graph, left: str, side: str, right: str) -> bool:
    """Return whether each name fits exactly one object, and the left one is directly on this side of the right one."""
    ones, others = called(graph, left), called(graph, right)
    if len(ones) != 1 or len(others) != 1:
        return False
    down, across = _SIDES[side]
    row, column = divmod(others[0]["place"], 3)
    return divmod(ones[0]["place"], 3) == (row + down, column + across)


def rows_hold(graph: Graph, text: str, fits: Callable[[dict[str, Any]], bool]) -> bool:
    """Return whether the text's counts by row, and the total at its end, are those of the objects that fit."""
    match = _ROW_COUNTS.search(text.lower())
    if match is None:
        return False
    counts = [sum(fits(one) and one["place"] // 3 == row for one in graph["objects"]) for row in range(3)]
    return [int(group) for group in match.groups()] == counts and text.rstrip(".").endswith(f": {sum(counts)}")


def facts(graph: Graph) -> tuple[set[str], set[str], set[tuple[str, str]]]:
    """Return the words and the values that a picture shows, and the pairs of them that stand in one row."""
    kind = graph["kind"]
    if kind in ("menu", "timetable"):
        pairs = {tuple(row) for row in graph["rows"]}
        words = {graph["title"]} | {cell for row in graph["rows"] for cell in row if cell.isalpha()}
        return words, {cell for row in graph["rows"] for cell in row if not cell.isalpha()}, pairs
    if kind == "ticket":
        words = {graph["start"], graph["end"], "FROM", "TO", "TIME", "SEAT", "PRICE"}
        return words, {graph["time"], graph["price"]}, set()
    words = set(graph.get("lines", ())) | ({graph["item"]} if "item" in graph else set())
    return words, {graph[name] for name in ("price", "time") if name in graph}, set()


def prints(graph: Graph, text: str) -> Iterator[tuple[str, bool]]:
    """Yield (claim, whether it is true) about words, prices, times, colours, degrees and routes."""
    words, values, pairs = facts(graph)
    for clause in _CLAUSE.split(text):
        said, numbers = _WORD.findall(clause), _VALUE.findall(clause)
        yield from ((word, word in words) for word in said)
        yield from ((value, value in values) for value in numbers)
        if pairs and len(said) == 1 and len(numbers) == 1:
            yield clause, (said[0], numbers[0]) in pairs or (numbers[0], said[0]) in pairs
    shown = {graph.get("colour"), graph.get("route"), graph.get("start", [""])[0], graph.get("end", [""])[0]}
    if graph["kind"] != "map":
        for word in re.findall(rf"\b({'|'.join(COLOURS)})\b", text.lower()):
            yield word, word in shown
    else:
        yield from routes(graph, text.lower())
    for match in re.finditer(r"(-?\d+) degrees", text):
        yield match.group(), int(match.group(1)) == graph.get("degrees")


def routes(graph: Graph, text: str) -> Iterator[tuple[str, bool]]:
    """Yield (claim, whether it is true) about a map's route: its ends, colour and steps."""
    for name, place in (("start", graph["path"][0]), ("end", graph["path"][-1])):
        for match in re.finditer(rf"{name}s in the {_PLACE} at the (\w+ \w+)", text):
            yield match.group(), (match.group("place"), match.group(2)) == (POSITIONS[place], " ".join(graph[name]))
    for match in re.finditer(rf"\b({'|'.join(COLOURS)}) route\b", text):
        yield match.group(), match.group(1) == graph["route"]
    if steps := re.findall(rf"(?:goes|then|^) ?({'|'.join(STEPS)})\b", text):
        at, path = graph["path"][0], [graph["path"][0]]
        for step in steps:
            at += STEPS[step][0] * 3 + STEPS[step][1]
            path.append(at)
        yield ", ".join(steps), path == graph["path"]
