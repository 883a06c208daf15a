"""Spelling of French and English: elision, contraction, agreement, plurals, a or an. Knows no grammar and no meaning.

The tables live in grammar/rules.yaml; the code only applies them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

GRAMMAR = Path(__file__).parent / "grammar"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> object:
    """The content of one YAML file (by the C loader where PyYAML has it, which is much faster)."""
    with path.open(encoding="utf-8") as handle:
        return yaml.load(handle, Loader=_LOADER)


RULES: dict = read_yaml(GRAMMAR / "rules.yaml")  # type: ignore[assignment] # the file holds a mapping
_FRENCH, _ENGLISH = RULES["french"], RULES["english"]
_NO_ELISION = frozenset(_FRENCH["no_elision"])
_VOWELS = frozenset(_FRENCH["vowels"])
_WORD = r"[^\W\d_][\w'-]*"


@dataclass(frozen=True)
class Gender:
    """Grammatical gender and number of a French noun; `column` indexes a determiner's four forms."""

    feminine: bool = False
    plural: bool = False

    @property
    def column(self) -> int:
        return int(self.feminine) + 2 * int(self.plural)


MASCULINE = Gender()


@cache
def starts_with_vowel(word: str) -> bool:
    """Whether `word` triggers elision (vowel or mute h)."""
    word = word.lower()
    return word[:1] in _VOWELS and re.split(r"[\s,.?!]", word)[0] not in _NO_ELISION and not word.startswith("yaou")


def determiner(name: str, gender: Gender, noun: str) -> str:
    """The determiner `name` ("le", "un", "mon", ...) before `noun`; elision itself is left to `finish_french`."""
    if name in ("en", "pays") and not gender.plural and not gender.feminine and starts_with_vowel(noun):
        gender = Gender(feminine=True)  # "en Iran", "d'Iran"
    return _FRENCH["determiners"][name][gender.column]


def _by_ending(word: str, table: Sequence[Sequence[str]]) -> str:
    for ending, replacement in table:
        if word.endswith(ending):
            return word[: len(word) - len(ending)] + replacement
    return word


def french_plural(noun: str) -> str:
    """Plural of a French noun phrase: its first word changes ("brosse à dents" gives "brosses à dents")."""
    head, space, rest = noun.partition(" ")
    return _by_ending(head, _FRENCH["plural"]) + space + rest


def adjective_forms(masculine: str) -> tuple[str, str, str, str]:
    """Masculine, feminine, masculine plural and feminine plural by rule; irregular ones are listed in the grammar."""
    feminine = _by_ending(masculine, _FRENCH["feminine"])
    return masculine, feminine, _by_ending(masculine, _FRENCH["plural"]), feminine + "s"


def english_plural(noun: str) -> str:
    """Plural of an English noun phrase: its last word changes."""
    return _by_ending(noun, _ENGLISH["plural"])


_ELIDE = re.compile(rf"(?<![\w'-])({'|'.join(_FRENCH['elide'])}) (?=({_WORD}))", re.IGNORECASE)
_BEFORE_VOWEL = re.compile(rf"(?<![\w'-])({'|'.join(_FRENCH['before_vowel'])}) (?=({_WORD}))", re.IGNORECASE)
_CONTRACT = re.compile(rf"(?<![\w-])({'|'.join(_FRENCH['contract'])})(?= )", re.IGNORECASE)
_SPACES = re.compile(r" {2,}")
_SENTENCE_START = re.compile(r"(^|[.?!] )([^\W\d_])")
_ARTICLE = re.compile(rf"(?<![\w'-])(a) ({_WORD})", re.IGNORECASE)


def _elided(match: re.Match[str]) -> str:
    word, following = match.groups()
    return _FRENCH["elide"][word.lower()] if starts_with_vowel(following) else match.group()


def _vowel_form(match: re.Match[str]) -> str:
    word, following = match.groups()
    if following in _FRENCH["not_nouns"] or not starts_with_vowel(following):
        return match.group()
    return f"{_FRENCH['before_vowel'][word.lower()]} "


def _capitals(text: str) -> str:
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def finish_french(text: str) -> str:
    """Elision, contraction, spacing and capitals of a French sentence put together from parts."""
    text = _SPACES.sub(" ", text).strip().replace(" ,", ",").replace(" .", ".")
    text = _ELIDE.sub(_elided, _BEFORE_VOWEL.sub(_vowel_form, text))
    text = _CONTRACT.sub(lambda match: _FRENCH["contract"][match.group(1).lower()], text)
    return _capitals(text)


def _article(match: re.Match[str]) -> str:
    article, word = match.groups()
    lower = word.lower()
    vowel = (lower[0] in _ENGLISH["an_before"] and lower not in _ENGLISH["a_words"]) or lower in _ENGLISH["an_words"]
    return f"{article}n {word}" if vowel else match.group()


def finish_english(text: str) -> str:
    """a or an, spacing and capitals of an English sentence put together from parts."""
    text = re.sub(r" ([,.?!])", r"\1", _SPACES.sub(" ", text).strip())
    return _capitals(_ARTICLE.sub(_article, text))
