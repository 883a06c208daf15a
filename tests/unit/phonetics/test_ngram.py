"""Tests the n-gram model: its probabilities and pruning, and KenLM's probabilities, if KenLM can be built."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdec.errors import InputError
from mmdec.phonetics.ngram import END, START, NGram

LN10 = math.log(10.0)
WORDS = ["the", "station", "is", "where", "please", "a", "room", "for", "two", "nights"]


def write_arpa(model: NGram, path: Path) -> None:
    """Write the model in the format that KenLM reads."""
    levels: list[list[str]] = [[] for _ in range(model.order)]
    levels[0].append(f"-99\t{START}\t{model.backoff[START] / LN10:.7f}")
    for context, followers in model.successors.items():
        for word, value in followers.items():
            entry = f"{context} {word}".lstrip()
            tail = f"\t{model.backoff[entry] / LN10:.7f}" if entry in model.backoff else ""
            levels[entry.count(" ")].append(f"{value / LN10:.7f}\t{entry}{tail}")
    lines = ["\\data\\", *(f"ngram {size}={len(level)}" for size, level in enumerate(levels, 1))]
    for size, level in enumerate(levels, 1):
        lines += ["", f"\\{size}-grams:", *level]
    path.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")


@pytest.mark.parametrize("order", [2, 3, 4])
def test_probabilities_equal_kenlms(order: int, tmp_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm", reason="kenlm is built from source, and is not installed here")
    rng = random.Random(order)
    sentences = [rng.choices(WORDS, weights=range(1, 11), k=rng.randint(1, 8)) for _ in range(300)]
    path, model = tmp_path / "lm.arpa", NGram.build(sentences, order=order)
    write_arpa(model, path)
    judge = kenlm.Model(str(path))
    assert judge.order == order
    for sentence in [*sentences[:50], *(rng.choices(WORDS, k=6) for _ in range(50))]:
        theirs = [score for score, _, _ in judge.full_scores(" ".join(sentence), bos=True, eos=True)]
        context, ours = model.advance("", "<s>"), []
        for word in (*sentence, "</s>"):
            ours.append(model.score(context, word) / LN10)
            context = model.advance(context, word)
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert model.sentence(sentence) / LN10 == pytest.approx(sum(theirs), abs=1e-4)
        assert math.isfinite(sum(ours))


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=5), min_size=1, max_size=12).filter(any),
    st.integers(1, 4),
    st.none() | st.integers(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_probabilities_sum_to_one_in_every_context(
    sentences: list[list[str]], order: int, max_entries: int | None
) -> None:
    model = NGram.build(sentences, order=order, vocabulary=["e"], max_entries=max_entries)
    for context in ("", START, "a", "a b", f"{START} a", "e e", "b c d"):
        state = model.advance("", context) if context else ""
        total = sum(math.exp(model.score(state, word)) for word in [*model.vocabulary, END])
        assert total == pytest.approx(1.0, abs=1e-3)


def test_seen_ngrams_are_preferred() -> None:
    model = NGram.build([s.split() for s in ["a b c", "a b c", "a b d", "b b"]])
    assert model.sentence(["a", "b", "c"]) > model.sentence(["a", "b", "d"]) > model.sentence(["d", "c", "a"])


def test_pruning_keeps_ngrams_that_backing_off_would_miss() -> None:
    texts = [["x", "y", "z"]] * 8 + [["w", "y", "w"]] * 8 + [["z", "z", "z"]]
    whole, pruned, empty = (NGram.build(texts, max_entries=entries) for entries in (None, 3, 0))
    assert [
        sum(len(row) for context, row in model.successors.items() if " " in context) for model in (pruned, empty)
    ] == [
        3,
        0,
    ]
    likelihoods = [sum(model.sentence(text) for text in texts) for model in (whole, pruned, empty)]
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert likelihoods[0] - likelihoods[1] < likelihoods[1] - likelihoods[2]


@pytest.mark.parametrize("sentences", [[["a b"]], [[START]], [[""]]])
def test_tokens_with_spaces_are_refused(sentences: list[list[str]]) -> None:
    with pytest.raises(InputError, match="plain tokens"):
        NGram.build(sentences)
