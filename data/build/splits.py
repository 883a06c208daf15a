"""The sentences of the phrasebook and their split, which is a property of the sentence whatever the seed.

A sentence is test when a hash of its normalised French says so, or when any of its derivations uses a pattern-filler
pair that is held out altogether; dev by the hash; train otherwise. Derivations are merged first, so one French sentence
has one split, one canonical rendering and one set of references.
"""

import hashlib
import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from grammar import MAX_RENDERINGS, Filler, Pattern, read_patterns

SALT = "mmdec phrasebook 1"
DEV_SHARE, TEST_SHARE, PAIR_SHARE = 0.03, 0.06, 0.02
# A slot of few fillers (the polite words, say) is never cut: it would take a third of a pattern away.
SMALL_SLOT = 8
# A word is held out of one pattern only if it has other places to be learned from.
MIN_PLACES = 3
# How often every French word shall occur among 12,000 training sentences.
MIN_OCCURRENCES = 20
# The sentences of a word that the grammar itself has few sentences for are recorded more often.
MAX_RECORDINGS = 8

_NOT_WORD = re.compile(r"[^\w' -]")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*'?")


def normalise(french: str) -> str:
    """Lower case, composed characters, no punctuation, single spaces: what makes two sentences the same."""
    text = unicodedata.normalize("NFC", french).lower().replace("\u2019", "'")
    return " ".join(_NOT_WORD.sub(" ", text).split())


def words(text: str) -> list[str]:
    """Word forms of a text: lower case, hyphens kept, an elided form ("l'") is a word of its own."""
    return _WORD.findall(text.lower())


def share(*parts: object) -> float:
    """A number in [0, 1) that depends on `parts` alone, on every machine and in every run."""
    digest = hashlib.blake2b("\t".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True)
class Sentence:
    """One French sentence, all its derivations (pattern, choice of fillers) and its split."""

    french: str
    key: str
    split: str
    derivations: tuple[tuple[Pattern, tuple[int, ...]], ...]

    @property
    def pattern(self) -> Pattern:
        return self.derivations[0][0]

    @cached_property
    def renderings(self) -> tuple[str, ...]:
        """Every accepted English reference, the canonical one first."""
        merged = dict.fromkeys(text for pattern, choice in self.derivations for text in pattern.render_english(choice))
        return tuple(merged)[:MAX_RENDERINGS]


def _used_form(pattern: Pattern, slot: str, filler: Filler) -> str:
    """The form that the pattern puts in the sentence: a counted noun is plural."""
    return filler.plural_form if f"*{slot}}}" in pattern.french else filler.french


def held_out_pairs(patterns: Sequence[Pattern]) -> dict[str, list[frozenset[int]]]:
    """For each pattern, per slot, the filler indices that never occur with it in train or dev."""
    places: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for pattern in patterns:
        for slot, fillers in pattern.slots.items():
            for filler in fillers:
                for word in words(_used_form(pattern, slot, filler)):
                    places[word].add((pattern.name, slot))
    held: dict[str, list[frozenset[int]]] = {}
    for pattern in patterns:
        held[pattern.name] = [
            frozenset(
                index
                for index, filler in enumerate(fillers)
                if len(fillers) >= SMALL_SLOT
                and share(SALT, "pair", pattern.name, slot, filler.french) < PAIR_SHARE
                and all(len(places[word]) >= MIN_PLACES for word in words(_used_form(pattern, slot, filler)))
            )
            for slot, fillers in pattern.slots.items()
        ]
    return held


def split_of(key: str, salt: str = SALT) -> str:
    """Split of a normalised sentence by its hash alone."""
    value = share(salt, key)
    if value < TEST_SHARE:
        return "test"
    return "dev" if value < TEST_SHARE + DEV_SHARE else "train"


def read_sentences(folder: str = "patterns") -> list[Sentence]:
    """Every sentence of the grammar's patterns in a folder, merged by its normalised French, with its split."""
    patterns = read_patterns(folder)
    held = held_out_pairs(patterns)
    french: dict[str, str] = {}
    derivations: dict[str, list[tuple[Pattern, tuple[int, ...]]]] = defaultdict(list)
    tested: set[str] = set()
    for pattern in patterns:
        kept_out = held[pattern.name]
        for choice in pattern.choices():
            text = pattern.render_french(choice)
            key = normalise(text)
            french.setdefault(key, text)
            derivations[key].append((pattern, choice))
            if any(index in slot for index, slot in zip(choice, kept_out, strict=True)):
                tested.add(key)
    return [
        Sentence(text, key, "test" if key in tested else split_of(key), tuple(derivations[key]))
        for key, text in french.items()
    ]


def in_order(sentences: Sequence[Sentence], seed: int) -> list[Sentence]:
    """The sentences by weighted random order: large patterns come less often than their size says (its square root)."""
    size = Counter(sentence.pattern.name for sentence in sentences)

    def rank(sentence: Sentence) -> float:
        draw = share(seed, sentence.key) or 2**-64
        return -math.log(draw) * math.sqrt(size[sentence.pattern.name])

    return sorted(sentences, key=rank)


def _forms(sentence: Sentence) -> set[str]:
    """The words to be learned from a sentence, of both languages."""
    return {*words(sentence.french), *(f"en:{word}" for word in words(sentence.renderings[0]))}


def recordings_of(chosen: Sequence[Sentence], least: int) -> list[int]:
    """Recordings of each sentence: at least `least`, up to MAX_RECORDINGS where one of its words is rare."""
    count = Counter(form for sentence in chosen for form in _forms(sentence))
    wanted = min(MIN_OCCURRENCES, len(chosen) // 600)
    rarest = (min(count[form] for form in _forms(sentence)) for sentence in chosen)
    return [max(least, min(MAX_RECORDINGS, -(-wanted // number))) for number in rarest]


def sample_train(sentences: Sequence[Sentence], count: int, seed: int) -> list[Sentence]:
    """`count` training sentences, shuffled, in which every word occurs often enough to be learned."""
    ordered = in_order(sentences, seed)
    forms = [_forms(sentence) for sentence in ordered]
    where: dict[str, list[int]] = defaultdict(list)
    for index, present in enumerate(forms):
        for word in present:
            where[word].append(index)
    wanted = min(MIN_OCCURRENCES, count // 600)
    chosen: set[int] = set()
    for word in sorted(where, key=lambda word: (len(where[word]), word)):
        have = sum(index in chosen for index in where[word])
        for index in where[word]:
            if have >= wanted or len(chosen) >= count:
                break
            if index not in chosen:
                chosen.add(index)
                have += 1
    for index in range(len(ordered)):
        if len(chosen) >= count:
            break
        chosen.add(index)
    picked = [ordered[index] for index in sorted(chosen)]
    random.Random(f"shuffle {seed}").shuffle(picked)
    return picked
