"""A question about a scene with its answer, and the wordings that questions and answers have.

An answer's wording follows from its question's, so that nothing in it is chance. Some wordings are held out: they are
asked in the split `test_templates` alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

Claim = tuple[str, ...]  # words that stand in one clause of the answer, in this order


@dataclass(frozen=True)
class Turn:
    """One question and its answer. expected: the answer's core, which a right answer must hold; "" in descriptions.
    claims: what a description states."""

    task: str
    question: str
    answer: str
    expected: str = ""
    claims: tuple[Claim, ...] = ()

    def record(self) -> dict[str, Any]:
        """What the corpus keeps beside the conversation."""
        kept = asdict(self)
        return {"task": kept["task"], "expected": kept["expected"], "claims": [list(claim) for claim in self.claims]}


# (question, answer) with the slots of the task; {x} is what is expected.
WORDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "colour": (
        ("What colour is the {thing}?", "{x}."),
        ("Which colour does the {thing} have?", "{x}."),
        ("Tell me the colour of the {thing}.", "The {thing} is {x}."),
    ),
    "shape": (
        ("What is {colour}?", "The {x}."),
        ("Which object is {colour}?", "The {x}."),
        ("Name the {colour} thing.", "The {colour} thing is the {x}."),
    ),
    "size": (
        ("How big is the {thing}?", "{x}."),
        ("Is the {thing} small or large?", "{x}."),
    ),
    "position": (
        ("What is in the {place}?", "{x}."),
        ("Which object is in the {place}?", "{x}."),
        ("Tell me what is in the {place}.", "In the {place} there is {x}."),
    ),
    "where": (
        ("Where is the {thing}?", "In the {x}."),
        ("In which part of the picture is the {thing}?", "In the {x}."),
        ("Find the {thing}.", "The {thing} is in the {x}."),
    ),
    "count": (
        ("How many {things} are there?", "{rows}: {x}."),
        ("Count the {things}.", "{rows}: {x}."),
        ("How many {things} do you see?", "{rows}: {x}."),
    ),
    "relation": (
        ("What is {side} the {thing}?", "{x}."),
        ("Which object is directly {side} the {thing}?", "{x}."),
    ),
    "yes_no": (
        ("Is there a {thing}?", "{x}."),
        ("Do you see a {thing}?", "{x}."),
        ("Does the picture show a {thing}?", "{x}."),
    ),
    "kind": (
        ("What is this?", "{x}."),
        ("What does the picture show?", "{x}."),
        ("What kind of picture is this?", "It is {x}."),
    ),
    "word": (
        ("Read {where}.", "{x}."),
        ("What is written in {where}?", "{x}."),
        ("What does {where} say?", "It says {x}."),
    ),
    "price": (
        ("Read the price in {where}.", "{x}."),
        ("Which price is in {where}?", "{x}."),
        ("What is the price in {where}?", "It is {x}."),
    ),
    "time": (
        ("Read the time in {where}.", "{x}."),
        ("Which time is in {where}?", "{x}."),
        ("What is the time in {where}?", "It is {x}."),
    ),
    "price_of": (
        ("How much is {item}?", "{x}."),
        ("What does {item} cost?", "{x}."),
        ("Tell me the price of {item}.", "{item} costs {x}."),
    ),
    "item_of": (
        ("What costs {price}?", "{x}."),
        ("Which item is {price}?", "{x}."),
    ),
    "time_of": (
        ("When does {town} leave?", "{x}."),
        ("At what time is {town}?", "{x}."),
        ("Tell me the time of {town}.", "{town} is at {x}."),
    ),
    "town_of": (
        ("What leaves at {time}?", "{x}."),
        ("Where does the {time} go?", "{x}."),
    ),
    "number": (
        ("What is the seat?", "{x}."),
        ("Which seat is it?", "Seat {x}."),
    ),
    "degrees": (
        ("How warm is it?", "{x} degrees."),
        ("What is the temperature?", "{x} degrees."),
        ("Read the thermometer.", "It shows {x} degrees."),
    ),
    "clock": (
        ("What time is it?", "{x}."),
        ("Which time does the clock show?", "{x}."),
        ("Read the clock.", "It is {x}."),
    ),
    "route": (
        ("How does the route go?", "{x}."),
        ("Which way does the route go?", "{x}."),
    ),
    "describe": (
        ("Describe the picture.", "{x}"),
        ("Describe this image.", "{x}"),
        ("What do you see?", "{x}"),
        ("Tell me all about this picture.", "{x}"),
        ("Describe the picture in detail.", "{x}"),
    ),
    "describe_back": (("Describe the picture from bottom to top.", "{x}"), ("Describe it from the end.", "{x}")),
}
HELD_OUT: dict[str, tuple[tuple[str, str], ...]] = {
    "colour": (("Can you tell me which colour the {thing} is?", "{x}."),),
    "shape": (("Which thing here is {colour}?", "The {x}."),),
    "position": (("What can you see in the {place}?", "{x}."),),
    "where": (("Where do you see the {thing}?", "In the {x}."),),
    "count": (("What is the number of {things} in the picture?", "{rows}: {x}."),),
    "word": (("Please read what is in {where}.", "{x}."),),
    "price": (("What price do you see in {where}?", "{x}."),),
    "time": (("What time do you see in {where}?", "{x}."),),
    "price_of": (("What is the price of {item}?", "{x}."),),
    "time_of": (("What time does {town} leave?", "{x}."),),
    "describe": (("Give me a description of the picture.", "{x}"),),
}


def turn(draw: Random, task: str, held: bool, expected: str, claims: Sequence[Claim] = (), **slots: str) -> Turn:
    """Word one question and its answer. held: with a held-out wording, where the task has one."""
    choices = HELD_OUT[task] if held and task in HELD_OUT else WORDINGS[task]
    question, answer = draw.choice(choices)
    answer = answer.format(x=expected, **slots)
    described = task.startswith("describe")
    return Turn(
        task="describe" if described else task,
        question=question.format(**slots),
        answer=answer[0].upper() + answer[1:],
        expected="" if described else expected,
        claims=tuple(claims),
    )


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
