"""The wordings that questions about scenes and their answers have.

Those of `HELD_OUT` are asked in the split `test_templates` alone. A person's own words are many: with three wordings a
task, the small model learned the sentences and not the question (docs/log.md), so each task has about ten.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

Wordings = tuple[tuple[str, str], ...]


def answered(answer: str, *questions: str) -> Wordings:
    """Questions with the same form of answer."""
    return tuple((question, answer) for question in questions)


def short(*questions: str) -> Wordings:
    """Questions that the core alone answers."""
    return answered("{x}.", *questions)


# (question, answer) with the slots of the task; {x} is what is expected.
WORDINGS: dict[str, Wordings] = {
    "colour": (
        *short(
            "What colour is the {thing}?",
            "Which colour does the {thing} have?",
            "What is the colour of the {thing}?",
            "What colour does the {thing} have?",
            "The {thing} has which colour?",
            "Say which colour the {thing} has.",
            "Can you see the colour of the {thing}?",
            "Please name the colour of the {thing}.",
            "In which colour is the {thing} painted?",
        ),
        ("Tell me the colour of the {thing}.", "The {thing} is {x}."),
        ("Please tell me what colour the {thing} is.", "The {thing} is {x}."),
    ),
    "shape": (
        ("What is {colour}?", "The {x}."),
        ("Which object is {colour}?", "The {x}."),
        ("What object is {colour}?", "The {x}."),
        ("What do you see that is {colour}?", "The {x}."),
        ("Which one is {colour}?", "The {x}."),
        ("Find the {colour} object.", "The {x}."),
        ("What is the {colour} object?", "The {x}."),
        ("Can you find what is {colour}?", "The {x}."),
        ("Please say what is {colour} in this picture.", "The {x}."),
        ("Name the {colour} thing.", "The {colour} thing is the {x}."),
        ("Tell me what the {colour} thing is.", "The {colour} thing is the {x}."),
    ),
    "size": short(
        "How big is the {thing}?",
        "Is the {thing} small or large?",
        "Is the {thing} large or small?",
        "What size is the {thing}?",
        "What is the size of the {thing}?",
        "How large is the {thing}?",
        "Which size does the {thing} have?",
        "Tell me the size of the {thing}.",
        "Is the {thing} big or small?",
    ),
    "position": (
        *short(
            "What is in the {place}?",
            "Which object is in the {place}?",
            "What object is in the {place}?",
            "What stands in the {place}?",
            "What is there in the {place}?",
            "What is shown in the {place} of the picture?",
            "Name what is in the {place}.",
            "Look at the {place}: what is there?",
            "Is there something in the {place}? What is it?",
            "Which thing do you find in the {place}?",
        ),
        ("Tell me what is in the {place}.", "In the {place} there is {x}."),
        ("Please say what you find in the {place}.", "In the {place} there is {x}."),
    ),
    "where": (
        ("Where is the {thing}?", "In the {x}."),
        ("In which part of the picture is the {thing}?", "In the {x}."),
        ("Where in the picture is the {thing}?", "In the {x}."),
        ("Where can I find the {thing}?", "In the {x}."),
        ("What is the place of the {thing}?", "In the {x}."),
        ("In which place is the {thing}?", "In the {x}."),
        ("Where does the {thing} stand?", "In the {x}."),
        ("Can you tell me where the {thing} is?", "In the {x}."),
        ("Find the {thing}.", "The {thing} is in the {x}."),
        ("Tell me where the {thing} is.", "The {thing} is in the {x}."),
        ("Please find the {thing} for me.", "The {thing} is in the {x}."),
    ),
    "count": answered(
        "{rows}: {x}.",
        "How many {things} are there?",
        "Count the {things}.",
        "How many {things} do you see?",
        "How many {things} does the picture show?",
        "How many {things} are in this picture?",
        "What number of {things} is there?",
        "Please count the {things} in the picture.",
        "Tell me how many {things} there are.",
        "Can you count the {things}?",
        "How many {things} can you find here?",
        "The number of {things}?",
    ),
    "relation": short(
        "What is {side} the {thing}?",
        "Which object is directly {side} the {thing}?",
        "What stands {side} the {thing}?",
        "What do you see {side} the {thing}?",
        "Which object is {side} the {thing}?",
        "What is there {side} the {thing}?",
        "Name the object directly {side} the {thing}.",
        "Tell me what is {side} the {thing}.",
    ),
    "yes_no": short(
        "Is there {a_thing}?",
        "Do you see {a_thing}?",
        "Does the picture show {a_thing}?",
        "Can you see {a_thing}?",
        "Is there {a_thing} in the picture?",
        "Is {a_thing} in this image?",
        "Does this image have {a_thing}?",
        "Can you find {a_thing} here?",
        "Tell me if there is {a_thing}.",
    ),
    "kind": (
        *short(
            "What is this?",
            "What does the picture show?",
            "What is in the picture?",
            "What does this image show?",
            "What is shown here?",
            "What am I looking at?",
        ),
        ("What kind of picture is this?", "It is {x}."),
        ("Tell me what this is.", "It is {x}."),
        ("What do we have here?", "It is {x}."),
    ),
    "word": (
        *short(
            "Read {where}.",
            "What is written in {where}?",
            "What is in {where}?",
            "Which word is in {where}?",
            "What text is in {where}?",
            "Please read {where} to me.",
            "What can you read in {where}?",
            "Read aloud what is in {where}.",
            "Which text does {where} have?",
        ),
        ("What does {where} say?", "It says {x}."),
        ("Tell me what {where} says.", "It says {x}."),
        ("Can you read {where}?", "It says {x}."),
    ),
    "price": (
        *short(
            "Read the price in {where}.",
            "Which price is in {where}?",
            "What price is in {where}?",
            "Which price do you read in {where}?",
            "What price does {where} have?",
            "Please read the price in {where}.",
            "What is the price written in {where}?",
            "How much is written in {where}?",
        ),
        ("What is the price in {where}?", "It is {x}."),
        ("Tell me the price in {where}.", "It is {x}."),
        ("Can you read the price in {where}?", "It is {x}."),
    ),
    "time": (
        *short(
            "Read the time in {where}.",
            "Which time is in {where}?",
            "What time is in {where}?",
            "Which time do you read in {where}?",
            "What time does {where} have?",
            "Please read the time in {where}.",
            "What is the time written in {where}?",
            "Which time is written in {where}?",
        ),
        ("What is the time in {where}?", "It is {x}."),
        ("Tell me the time in {where}.", "It is {x}."),
        ("Can you read the time in {where}?", "It is {x}."),
    ),
    "price_of": (
        *short(
            "How much is {item}?",
            "What does {item} cost?",
            "How much does {item} cost?",
            "Which price does {item} have?",
            "What do I pay for {item}?",
            "How much do I pay for {item}?",
            "What is {item} sold for?",
            "What price does {item} have?",
            "Find the price of {item}.",
        ),
        ("Tell me the price of {item}.", "{item} costs {x}."),
        ("Please tell me how much {item} is.", "{item} costs {x}."),
    ),
    "item_of": short(
        "What costs {price}?",
        "Which item is {price}?",
        "Which item costs {price}?",
        "What can I buy for {price}?",
        "What is sold for {price}?",
        "What do I get for {price}?",
        "Tell me what costs {price}.",
        "What has the price {price}?",
    ),
    "time_of": (
        *short(
            "When does {town} leave?",
            "At what time is {town}?",
            "When is {town}?",
            "At which time does {town} leave?",
            "Which time is written for {town}?",
            "When do I leave for {town}?",
            "What is the time of {town}?",
            "Find the time of {town}.",
        ),
        ("Tell me the time of {town}.", "{town} is at {x}."),
        ("Please tell me when {town} leaves.", "{town} is at {x}."),
    ),
    "town_of": short(
        "What leaves at {time}?",
        "Where does the {time} go?",
        "Which town is at {time}?",
        "Which town leaves at {time}?",
        "What town is at {time}?",
        "Where can I go at {time}?",
        "Tell me what leaves at {time}.",
    ),
    "number": (
        *short(
            "What is the seat?",
            "What seat is it?",
            "Which number does the seat have?",
            "What is the number of the seat?",
            "Where do I sit?",
        ),
        ("Which seat is it?", "Seat {x}."),
        ("Tell me the seat.", "Seat {x}."),
        ("Which seat do I have?", "Seat {x}."),
    ),
    "degrees": (
        *(
            (question, "{x} degrees.")
            for question in ("How warm is it?", "What is the temperature?", "How cold is it?")
        ),
        ("How many degrees are there?", "{x} degrees."),
        ("Which temperature do you read?", "{x} degrees."),
        ("Read the thermometer.", "It shows {x} degrees."),
        ("What does the thermometer show?", "It shows {x} degrees."),
    ),
    "clock": (
        *short(
            "What time is it?",
            "Which time does the clock show?",
            "What time does the clock show?",
            "What is the time?",
            "Can you tell me the time?",
            "How late is it?",
        ),
        ("Read the clock.", "It is {x}."),
        ("Tell me what time it is.", "It is {x}."),
        ("What does the clock say?", "It is {x}."),
    ),
    "route": short(
        "How does the route go?",
        "Which way does the route go?",
        "What are the steps of the route?",
        "Follow the route.",
        "Tell me the way of the route.",
        "How do I follow the route?",
    ),
    "describe": answered(
        "{x}",
        "Describe the picture.",
        "Describe this image.",
        "What do you see?",
        "Tell me all about this picture.",
        "Describe the picture in detail.",
        "Describe this picture.",
        "Describe the image.",
        "Describe this image in detail.",
        "What can you see in this picture?",
        "Please describe the image.",
        "Please describe what you see in detail.",
        "Tell me what you see.",
        "Say all that the picture shows.",
        "Can you describe this picture for me?",
    ),
    "describe_back": answered(
        "{x}",
        "Describe the picture from bottom to top.",
        "Describe it from the end.",
        "Describe this image from bottom to top.",
        "Begin at the bottom and describe the picture.",
    ),
}
HELD_OUT: dict[str, Wordings] = {
    "colour": short("Can you tell me which colour the {thing} is?"),
    "shape": (("Which thing here is {colour}?", "The {x}."),),
    "position": short("What can you see in the {place}?"),
    "where": (("Where do you see the {thing}?", "In the {x}."),),
    "count": (("What is the number of {things} in the picture?", "{rows}: {x}."),),
    "word": short("Please read what is in {where}."),
    "price": short("What price do you see in {where}?"),
    "time": short("What time do you see in {where}?"),
    "price_of": short("What is the price of {item}?"),
    "time_of": short("What time does {town} leave?"),
    "describe": (("Give me a description of the picture.", "{x}"),),
}


def in_passing(question: str, choice: float) -> str:
    """The question as people type it in a hurry. choice: 0 to 1; most are left as they are."""
    if choice < 0.08:
        return question[0].lower() + question[1:].rstrip("?.")
    if choice < 0.16:
        return question.replace("colour", "color").replace("centre", "center")
    if choice < 0.22:
        return question.rstrip("?.")
    return question


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


def turn(draw: Random, task: str, held: bool, expected: str, claims: Sequence[Claim] = (), **slots: str) -> Turn:
    """Word one question and its answer. held: with a held-out wording, where the task has one."""
    question, answer = draw.choice(HELD_OUT[task] if held and task in HELD_OUT else WORDINGS[task])
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
