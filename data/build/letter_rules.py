"""Rules by which letters are read, learnt from a lexicon: what the letter says, given the letters around it.

Letters and phones of each word are aligned (expectation maximisation; a letter has 0, 1 or 2 phones). A rule is then
what a letter says most often in a context; a wider context has a rule where it says something else than the rule that
sees less. (Daelemans and van den Bosch, 1996: IGTree.)
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from mmdec.phonetics.spelling import MAX_CONTEXT_LETTERS, SILENT_LETTER, WORD_EDGE, contexts

Phones = tuple[str, ...]
MOST = 2  # phones of a letter
ROUNDS = 6


def _table(word: str, phones: Phones, weight: Mapping[tuple[str, Phones], float]) -> list[list[float]]:
    """Sums of the weights of all alignments of the first i letters with the first j phones."""
    sums = [[0.0] * (len(phones) + 1) for _ in range(len(word) + 1)]
    sums[0][0] = 1.0
    for i, letter in enumerate(word):
        for j, sofar in enumerate(sums[i]):
            if sofar:
                for size in range(min(MOST, len(phones) - j) + 1):
                    sums[i + 1][j + size] += sofar * weight.get((letter, phones[j : j + size]), 0.0)
    return sums


def _normalised(counts: Mapping[tuple[str, Phones], float]) -> dict[tuple[str, Phones], float]:
    total: dict[str, float] = defaultdict(float)
    for (letter, _), count in counts.items():
        total[letter] += count
    return {pair: count / total[pair[0]] for pair, count in counts.items()}


def _expected(words: Iterable[tuple[str, Phones]], weight: dict[tuple[str, Phones], float]) -> dict:
    """How often each letter says what, over all alignments."""
    counts: dict[tuple[str, Phones], float] = defaultdict(float)
    backwards = {(letter, said[::-1]): value for (letter, said), value in weight.items()}
    for word, phones in words:
        ahead = _table(word, phones, weight)
        behind = _table(word[::-1], phones[::-1], backwards)
        whole = ahead[-1][-1]
        if not whole:
            continue
        for i, letter in enumerate(word):
            for j in range(len(phones) + 1):
                for size in range(min(MOST, len(phones) - j) + 1):
                    pair = letter, phones[j : j + size]
                    after = behind[len(word) - i - 1][len(phones) - j - size]
                    if ahead[i][j] and after and pair in weight:
                        counts[pair] += ahead[i][j] * weight[pair] * after / whole
    return counts


def _best(word: str, phones: Phones, weight: Mapping[tuple[str, Phones], float]) -> list[Phones] | None:
    """The most probable alignment: what each letter says."""
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for letter in word:
        reached: dict[int, tuple[float, int]] = {}
        for j, (sofar, _) in best[-1].items():
            for size in range(min(MOST, len(phones) - j) + 1):
                value = weight.get((letter, phones[j : j + size]), 0.0)
                if value and (j + size not in reached or sofar + math.log(value) > reached[j + size][0]):
                    reached[j + size] = sofar + math.log(value), size
        best.append(reached)
    if len(phones) not in best[-1]:
        return None
    said, end = [], len(phones)
    for column in reversed(best[1:]):
        size = column[end][1]
        said.append(phones[end - size : end])
        end -= size
    return said[::-1]


def _prior(letter: str, said: Phones) -> float:
    """What the first round believes: a letter says one phone, a vowel's letter a vowel."""
    alike = all((phone[0] in "aeiou") == (letter in "aeiouy") for phone in said)
    return (1.0 if len(said) == 1 else 0.1) * (1.0 if alike else 0.02)


def align(words: list[tuple[str, Phones]]) -> list[tuple[str, list[Phones]]]:
    """What each letter of each word says. Words with more phones than their letters can say are left out."""
    pairs = {
        (letter, phones[j : j + size])
        for word, phones in words
        for letter in word
        for size in range(MOST + 1)
        for j in range(len(phones) - size + 1)
    }
    weight = {pair: _prior(*pair) for pair in pairs}
    for _ in range(ROUNDS):
        weight = _normalised(_expected(words, weight))
        weight = {pair: value for pair, value in weight.items() if value > 1e-4}
    aligned = ((word, _best(word, phones, weight)) for word, phones in words)
    return [(word, said) for word, said in aligned if said is not None]


def learn(words: list[tuple[str, Phones]]) -> dict[str, Phones]:
    """Rules "left(letter)right" -> phones (`SILENT` alone for none), those that see least first."""
    seen: dict[str, Counter[Phones]] = defaultdict(Counter)
    wider: dict[str, str] = {}  # rule -> the one that sees a letter less
    for word, said in align(words):
        padded = WORD_EDGE * MAX_CONTEXT_LETTERS + word + WORD_EDGE * MAX_CONTEXT_LETTERS
        for place, phones in enumerate(said, MAX_CONTEXT_LETTERS):
            names = contexts(padded, place)
            for name in names:
                seen[name][phones] += 1
            wider.update(zip(names[1:], names, strict=False))
    said_by: dict[str, Phones] = {}  # what is said in a context, by its own rule or one that sees less
    rules: dict[str, Phones] = {}
    for name in sorted(seen, key=lambda name: (len(name), name)):
        usual = said_by.get(wider.get(name, ""))
        phones, count = max(seen[name].items(), key=lambda item: (item[1], item[0]))
        if usual is None or count > seen[name][usual]:
            rules[name] = phones or (SILENT_LETTER,)
            said_by[name] = phones
        else:
            said_by[name] = usual
    return rules
