"""Checks whether an answer about a picture is right: a short answer by its text, a description by its claims."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CLAUSE = re.compile(r"[.;,:](?:\s+|$)|\n")
_NUMBER = re.compile(r"-?\d+")
_DENIAL = re.compile(r"\b(?:not|no|never)\b|n't\b")
_STATED = r"(?:(?:[\w'-]+ )*(?:is|are|has|have|costs|says|shows|reads|leaves|at) )?(?:(?:(?:in|at|on) )?(?:the|an?) )?"


def normalise(text: str) -> str:
    """Lower case, single spaces, no full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def right_answer(answer: str, reference: str, expected: str, task: str) -> bool:
    """Whether a short answer equals the reference. For counting questions only the total must be right."""
    if task == "count":
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and numbers[-1] == expected
    return normalise(answer) == normalise(reference)


def right_in_other_words(answer: str, expected: str) -> bool:
    """Whether a short answer equals `expected`, alone or at the end of a sentence that states it ("The house is red."
    for "red") and negates nothing. `right_answer` demands the reference's own words."""
    said, wanted = normalise(answer), normalise(expected)
    if not wanted or (_DENIAL.search(said) and not _DENIAL.search(wanted)):
        return False
    return re.fullmatch(_STATED + re.escape(wanted) + "(?: degrees)?", said) is not None


def claims_held(answer: str, claims: Iterable[Sequence[str]]) -> int:
    """How many claims an answer makes: those whose words occur in one clause of it, in their order."""
    clauses = [clause for clause in _CLAUSE.split(answer.casefold()) if clause]
    return sum(any(_has_words(clause, claim) for clause in clauses) for claim in claims)


def _has_words(clause: str, claim: Sequence[str]) -> bool:
    pattern = ".*?".join(rf"(?<![\w-]){re.escape(word.casefold())}(?![\w])" for word in claim)
    return re.search(pattern, clause) is not None
