"""The synchronous French-English grammar: patterns with typed slots, read from grammar/*.yaml and enumerated.

A pattern is a French template and one or more English ones:

    fr: "{hi} où {p#est/sont} {p.le} {pls} ?"        en: "{hi} (where {p#is/are}|where's) {p.the} {pls}?"

French slots:   {p} bare   {p.le} with a determiner   {p.s} plural   {n*p} counted   {a&p} adjective agreeing with p
                {p~ouvert} literal adjective agreeing with p   {p#singular/plural}   {p@masculine/feminine}
English slots:  {p} bare   {p.a} a, an or some   {p.the}   {p.this} this or these   {p.s} plural   {n*p} counted
                {p#singular/plural}
(A|B) lists English renderings, the canonical one first; so do the synonyms of a filler. See data/README.md.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numerals
from agreement import (
    GRAMMAR,
    MASCULINE,
    Gender,
    adjective_forms,
    determiner,
    english_plural,
    finish_english,
    finish_french,
    french_plural,
    read_yaml,
)

MAX_RENDERINGS = 64
MAX_PATTERN_SIZE = 8000


@dataclass(frozen=True)
class English:
    """One English rendering of a filler. `kind`: "" countable, "p" plural, "m" mass, "0" without article."""

    text: str
    kind: str = ""
    plural_text: str = ""

    @property
    def is_plural(self) -> bool:
        return self.kind == "p"


@dataclass(frozen=True)
class Filler:
    """What fills a slot: French forms (one, or the four of an adjective), gender, English renderings."""

    forms: tuple[str, ...]
    english: tuple[English, ...]
    gender: Gender = MASCULINE
    plural_form: str = ""

    @property
    def french(self) -> str:
        return self.forms[0]


def _english(text: str) -> English:
    body, _, kind = text.strip().partition("/")
    singular, _, plural = body.partition(",")
    if kind != "phrase":
        return English(singular.strip(), kind, plural.strip() or english_plural(singular.strip()))
    return English(body)


def _split(line: str, what: str) -> tuple[str, list[str]]:
    french, equals, english = line.partition("=")
    if not equals:
        raise ValueError(f"`{what}` must hold French = English, but is {line!r}. Write the equals sign.")
    return french.strip(), [part.strip() for part in english.split("|")]


def _noun(line: str) -> Filler:
    french, english = _split(line, "noun")
    forms, _, mark = french.rpartition(" ")
    if mark not in ("m", "f", "mp", "fp"):
        raise ValueError(f"`noun` must name its gender (m, f, mp, fp), but is {line!r}. Add it before the equals sign.")
    singular, _, plural = forms.partition(",")
    gender = Gender(feminine=mark[0] == "f", plural=mark.endswith("p"))
    return Filler((singular,), tuple(map(_english, english)), gender, plural or french_plural(singular))


def _adjective(line: str) -> Filler:
    french, english = _split(line, "adjective")
    forms = tuple(french.split(","))
    return Filler(forms if len(forms) > 1 else adjective_forms(french), tuple(English(text) for text in english))


def _verb(line: str) -> Filler:
    """`ouvrir/ouvre/ouvrez la porte = open the door`: {v}, {v.f} to one's "tu", {v.s} to one's "vous"."""
    french, english = _split(line, "verb")
    head, _, rest = french.partition(" ")
    infinitive, singular, plural = (f"{form} {rest}" for form in head.split("/"))
    return Filler((infinitive, singular), tuple(English(text) for text in english), plural_form=plural)


def _phrase(line: str) -> Filler:
    french, english = _split(line, "phrase")
    return Filler((french,), tuple(English(text) for text in english))


_ITEM: dict[str, Callable[[str], Filler]] = {
    "noun": _noun,
    "adjective": _adjective,
    "verb": _verb,
    "phrase": _phrase,
    "name": lambda line: Filler((line,), (English(line),)),  # the same in both languages
}


def _numerals(kind: str, spec: dict) -> Iterator[Filler]:
    if kind == "number":
        values = spec.get("values") or list(range(spec["from"], spec["to"] + 1, spec.get("step", 1)))
        source = numerals.numbers(values, ordinal=spec.get("ordinal", False))
    else:
        source = {
            "time": numerals.times,
            "plain_time": lambda: numerals.plain_times(spec["hours"], noon=spec.get("noon", False), midnight=False),
            "timetable": numerals.timetable,
            "price": numerals.prices,
            "date": numerals.dates,
            "year": lambda: numerals.years(spec["from"], spec["to"]),
        }[kind]()
    for item in source:
        yield Filler((item.french, item.feminine), tuple(English(text) for text in item.english))


def read_classes() -> dict[str, list[Filler]]:
    """All filler classes by name. A class may take in others (`with`) and leave items out (`without`)."""
    specs: dict[str, dict] = {}
    for path in sorted((GRAMMAR / "classes").glob("*.yaml")):
        for name, spec in read_yaml(path).items():  # type: ignore[attr-defined] # the file holds a mapping
            if name in specs:
                raise ValueError(
                    f"`class` names must be unique, but {name!r} is defined twice. Rename it in {path.name}."
                )
            specs[name] = spec
    classes: dict[str, list[Filler]] = {}

    def resolve(name: str) -> list[Filler]:
        if name not in classes:
            spec = specs[name]
            make = _ITEM.get(spec["kind"])
            fillers = [make(line) for line in spec.get("items", [])] if make else list(_numerals(spec["kind"], spec))
            fillers += [filler for other in spec.get("with", []) for filler in resolve(other)]
            dropped = set(spec.get("without", []))
            classes[name] = [filler for filler in fillers if filler.french not in dropped]
        return classes[name]

    for name in specs:
        resolve(name)
    return classes


_SLOT = re.compile(r"\{(\w+)(?:([.*&~#@])([^}]*))?\}")
_Env = dict[str, tuple[Filler, English]]


def _french_forms(slot: str, sign: str, argument: str, slots: dict[str, list[Filler]]) -> tuple[tuple[str, ...], list]:
    """The slots that one French place depends on, and its text for each (pair of) filler(s)."""
    own = slots[slot]
    if sign == "":
        return (slot,), [filler.french for filler in own]
    if sign == ".":
        if argument == "s":
            return (slot,), [filler.plural_form for filler in own]
        if argument == "f":
            return (slot,), [filler.forms[1] for filler in own]
        return (slot,), [f"{determiner(argument, filler.gender, filler.french)} {filler.french}" for filler in own]
    if sign == "~":
        return (slot,), [adjective_forms(argument)[filler.gender.column] for filler in own]
    if sign == "#":
        return (slot,), [argument.split("/")[filler.gender.plural] for filler in own]
    if sign == "@":
        return (slot,), [argument.split("/")[filler.gender.feminine] for filler in own]
    nouns = slots[argument]
    if sign == "&":
        return (slot, argument), [[filler.forms[noun.gender.column] for noun in nouns] for filler in own]
    return (slot, argument), [
        [f"{number.forms[noun.gender.feminine]} {noun.plural_form}" for noun in nouns] for number in own
    ]


def _english_form(slot: str, sign: str, argument: str, env: _Env) -> str:
    filler, english = env[slot]
    if sign == "":
        return english.text
    if sign == "#":
        return argument.split("/")[english.is_plural]
    if sign == "@":
        return argument.split("/")[filler.gender.feminine]
    if sign == "*":
        noun = env[argument][1]
        return f"{english.text} {noun.text if noun.kind else noun.plural_text}"
    if argument == "s":
        return english.text if english.kind else english.plural_text
    article = {
        "a": "some" if english.kind in ("p", "m") else "a",
        "the": "the",
        "this": "these" if english.is_plural else "this",
    }
    return english.text if english.kind == "0" else f"{article[argument]} {english.text}"


def _alternatives(template: str) -> list[str]:
    """All readings of a template with nested (A|B), the first branch of each first."""
    depth, start, pieces = 0, 0, [[""]]
    branches: list[str] = []
    for index, character in enumerate(template):
        if character == "(":
            if depth == 0:
                pieces.append([template[start:index]])
                start, branches = index + 1, []
            depth += 1
        elif character == "|" and depth == 1:
            branches.append(template[start:index])
            start = index + 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                branches.append(template[start:index])
                start = index + 1
                pieces.append([text for branch in branches for text in _alternatives(branch)])
    pieces.append([template[start:]])
    return ["".join(parts) for parts in itertools.product(*pieces)]


@dataclass(frozen=True)
class Pattern:
    """A French template, its English templates and the fillers of each slot."""

    name: str
    topic: str
    french: str
    english: tuple[str, ...]
    slots: dict[str, list[Filler]] = field(repr=False)
    classes: dict[str, str] = field(default_factory=dict)
    keep: int = MAX_PATTERN_SIZE

    @cached_property
    def _parts(self) -> list[str | tuple[tuple[int, ...], list]]:
        names, parts, end = list(self.slots), [], 0
        for match in _SLOT.finditer(self.french):
            parts.append(self.french[end : match.start()])
            depends, table = _french_forms(match[1], match[2] or "", match[3] or "", self.slots)
            parts.append((tuple(names.index(name) for name in depends), table))
            end = match.end()
        return [*parts, self.french[end:]]

    @cached_property
    def _readings(self) -> list[str]:
        return [reading for template in self.english for reading in _alternatives(template)]

    def choices(self) -> Iterator[tuple[int, ...]]:
        """Filler indices of each sentence; a large pattern keeps a fixed sample of its space."""
        sizes = [len(fillers) for fillers in self.slots.values()]
        total = 1
        for size in sizes:
            total *= size
        same = [
            (i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(self.slots), 2)
            if self.classes[a] == self.classes[b]
        ]
        picked: Sequence[int] = range(total)
        if total > self.keep:
            picked = random.Random(self.name).sample(range(total), self.keep)
        for number in picked:
            choice = []
            for size in reversed(sizes):
                number, index = divmod(number, size)
                choice.append(index)
            choice.reverse()
            if all(choice[i] != choice[j] for i, j in same):
                yield tuple(choice)

    def render_french(self, choice: tuple[int, ...]) -> str:
        """The French sentence of one choice of fillers."""
        texts = []
        for part in self._parts:
            if isinstance(part, str):
                texts.append(part)
            else:
                form = part[1]
                for index in part[0]:
                    form = form[choice[index]]
                texts.append(form)
        return finish_french("".join(texts))

    def render_english(self, choice: tuple[int, ...]) -> list[str]:
        """Every accepted English reference of one choice of fillers, the canonical one first."""
        names = list(self.slots)
        fillers = [self.slots[name][index] for name, index in zip(names, choice, strict=True)]
        rendered: dict[str, None] = {}
        for english in itertools.product(*(filler.english for filler in fillers)):
            env = {name: (filler, form) for name, filler, form in zip(names, fillers, english, strict=True)}
            for reading in self._readings:
                text = _SLOT.sub(lambda m, env=env: _english_form(m[1], m[2] or "", m[3] or "", env), reading)
                rendered[finish_english(text)] = None
            if len(rendered) >= MAX_RENDERINGS:
                break
        return list(rendered)[:MAX_RENDERINGS]


def read_patterns(folder: str = "patterns") -> list[Pattern]:
    """All patterns of a folder, in file order; a fixed phrase is a pattern without slots."""
    classes, patterns = read_classes(), []
    for path in sorted((GRAMMAR / folder).glob("*.yaml")):
        for spec in read_yaml(path):  # type: ignore[attr-defined] # the file holds a list
            english = spec["en"] if isinstance(spec["en"], list) else [spec["en"]]
            names = dict.fromkeys(m for match in _SLOT.finditer(spec["fr"]) for m in _names(match))
            given = spec.get("slots", {})
            chosen = {name: given.get(name, name.rstrip("0123456789")) for name in names}
            slots = {name: classes[source] for name, source in chosen.items()}
            digest = hashlib.blake2b(spec["fr"].encode(), digest_size=4).hexdigest()
            name = spec.get("id", f"{path.stem}-{digest}")
            keep = spec.get("keep", MAX_PATTERN_SIZE)
            patterns.append(Pattern(name, path.stem, spec["fr"], tuple(english), slots, chosen, keep))
    return patterns


def _names(match: re.Match[str]) -> list[str]:
    return [match[1], match[3]] if match[2] in ("*", "&") else [match[1]]
