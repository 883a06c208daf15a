"""The pronunciations of English words in context, found by cutting each sentence's phones into those of its words.

A word's first pronunciation is the one flite gives it alone. Where a sentence does not divide into known
pronunciations and exactly one stretch of phones is unexplained, that stretch is a new pronunciation of the word there.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

Phones = tuple[str, ...]
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")


def english_words(text: str) -> list[str]:
    """The words of an English sentence in lower case; apostrophes and hyphens stay inside them."""
    return [word.lower() for word in _WORD.findall(text)]


def _segment(words: list[str], phones: Phones, lexicon: dict[str, Counter[Phones]]) -> list[Phones] | None:
    """The phones of each word if the sentence divides exactly, else None. More frequent pronunciations first."""
    dead: set[tuple[int, int]] = set()
    result: list[Phones] = []

    def walk(word: int, start: int) -> bool:
        if word == len(words):
            return start == len(phones)
        if (word, start) in dead:
            return False
        for said, _ in lexicon[words[word]].most_common():
            if phones[start : start + len(said)] == said:
                result.append(said)
                if walk(word + 1, start + len(said)):
                    return True
                result.pop()
        dead.add((word, start))
        return False

    return result if walk(0, 0) else None


def _unexplained(words: list[str], phones: Phones, lexicon: dict[str, Counter[Phones]]) -> list[tuple[str, Phones]]:
    """Every (word, phones) that alone would make the sentence divide."""
    count = len(words)
    left = [set() for _ in range(count + 1)]  # phone positions reachable before word i
    right = [set() for _ in range(count + 1)]  # phone positions from which words i.. reach the end
    left[0], right[count] = {0}, {len(phones)}
    for i, word in enumerate(words):
        for start in left[i]:
            left[i + 1] |= {start + len(s) for s in lexicon[word] if phones[start : start + len(s)] == s}
    for i in reversed(range(count)):
        for end in right[i + 1]:
            right[i] |= {end - len(s) for s in lexicon[words[i]] if end >= len(s) and phones[end - len(s) : end] == s}
    found = []
    for i, word in enumerate(words):
        for start in left[i]:
            usual = max(len(said) for said in lexicon[word])
            found += [
                (word, phones[start:end]) for end in right[i + 1] if start < end and abs(end - start - usual) <= 2
            ]
    return found


def build_lexicon(
    spoken: Iterable[tuple[str, list[str]]], pronounce: Callable[[str], list[str]], rounds: int = 4
) -> tuple[list[tuple[str, Phones]], float]:
    """Pronunciations of each word, most frequent first, from (sentence, phones); and the share that divides exactly."""
    sentences = [(english_words(text), tuple(phones)) for text, phones in spoken]
    lexicon: dict[str, Counter[Phones]] = {
        word: Counter({tuple(pronounce(word)): 1}) for word in sorted({word for text, _ in sentences for word in text})
    }
    for _ in range(rounds):
        votes: Counter[tuple[str, Phones]] = Counter()
        rest: list[list[tuple[str, Phones]]] = []
        for text, phones in sentences:
            if _segment(text, phones, lexicon) is None:
                options = _unexplained(text, phones, lexicon)
                rest.append(options)
                votes.update(set(options))
        for options in rest:
            if options:  # the explanation that most sentences share
                word, said = max(options, key=lambda option: (votes[option], option))
                lexicon[word][said] += 0
        if not any(rest):
            break
    used: dict[str, Counter[Phones]] = defaultdict(Counter)
    exact = 0
    for text, phones in sentences:
        parts = _segment(text, phones, lexicon)
        if parts is not None:
            exact += 1
            for word, said in zip(text, parts, strict=True):
                used[word][said] += 1
    for word, known in lexicon.items():
        if not used[word]:
            used[word].update(known)
    entries = [
        (word, said)
        for word in sorted(used)
        for said, _ in sorted(used[word].items(), key=lambda item: (-item[1], item[0]))
    ]
    return entries, exact / max(len(sentences), 1)
