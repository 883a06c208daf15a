"""A question about a scene with its answer.

An answer's wording follows from its question's, so that nothing in it is chance.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from scene_wordings import HELD_OUT, WORDINGS

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
