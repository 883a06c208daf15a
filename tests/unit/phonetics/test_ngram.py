"""Compares the n-gram model with KenLM on the same file, if KenLM can be built."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from mmdec.phonetics.ngram import LN10, NGram

WORDS = ["the", "station", "is", "where", "please", "a", "room", "for", "two", "nights"]


@pytest.mark.parametrize("order", [2, 3, 4])
def test_probabilities_equal_kenlms(order: int, tmp_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm", reason="kenlm is built from source, and is not installed here")
    rng = random.Random(order)
    sentences = [rng.choices(WORDS, weights=range(1, 11), k=rng.randint(1, 8)) for _ in range(300)]
    path = tmp_path / "lm.arpa"
    NGram.build(sentences, order=order).save(path)
    model = NGram.load(path)  # with the decimals that the file has
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
