"""Tests the decoder from phones to words: the language model, approximate matching and search, each against a simple
reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdec.phonetics.decoder import WordDecoder, render, tokenize
from mmdec.phonetics.lexicon import DELETION, INSERTION, ApproximateLexicon, read_lexicon, substitution_cost
from mmdec.phonetics.ngram import END, START, NGram
from mmdec.types import InputError

LEXICON = {
    word: [tuple(phones.split()) for phones in said.split(" | ")]
    for word, said in {
        "where": "w eh r",
        "is": "ih z",
        "the": "dh ax | dh iy",
        "station": "s t ey sh ax n",
        "museum": "m y uw z iy ax m",
        "museums": "m y uw z iy ax m z",
        "please": "p l iy z",
        "two": "t uw",
        "to": "t ax | t uw",
        "too": "t uw",
        "four": "f ao r",
        "for": "f ao r",
        "their": "dh eh r",
        "there": "dh eh r",
        "i": "ay",
        "i'd": "ay d",
        "like": "l ay k",
        "tickets": "t ih k ax t s",
        "open": "ow p ax n",
        "on": "aa n",
        "monday": "m ah n d iy",
        "mondays": "m ah n d iy z",
        "lyon": "l ay ax n",
        "hello": "hh ax l ow",
        "twenty": "t w eh n t iy",
        "one": "w ah n",
        "euros": "y uh r ow z",
        "it's": "ih t s",
        "hot": "hh aa t",
        "train": "t r ey n",
        "thank": "th ae ng k",
        "you": "y uw",
    }.items()
}
SENTENCES = [
    "Where is the station, please?",
    "Is the museum open on Monday?",
    "The museum is open on Monday.",
    "I'd like two tickets to Lyon, please.",
    "I'd like four tickets for Lyon, please.",
    "It's too hot.",
    "Hello, where is their train?",
    "Hello, there is the train.",
    "Twenty-one euros, please.",
    "Thank you!",
]


@pytest.fixture(scope="module")
def decoder() -> WordDecoder:
    return WordDecoder.build(LEXICON, SENTENCES)


def say(text: str) -> list[str]:
    """Phones by the first pronunciation; a pause at each inner mark."""
    phones: list[str] = []
    for token in text.lower().replace("-", " ").replace(",", " ,").rstrip(".?!").split():
        phones += ["pau"] if token in (",", ".") else LEXICON[token][0]
    return phones


@pytest.mark.parametrize("text", SENTENCES)
def test_exact_phones_give_back_the_text(decoder: WordDecoder, text: str) -> None:
    assert decoder.decode(say(text)) == text


@pytest.mark.parametrize(
    ("text", "phones"),
    [
        ("Where is the museum, please?", "w eh r ih z dh ax m y uw z iy ax m pau p l iy z"),  # not in the training text
        ("I'd like two tickets for Lyon, please.", "ay d l ay k t uw t ih k ax t s f ao r l ay ax n pau p l iy z"),
        (
            "Where is the station, please?",
            "pau w eh r ih z dh ax s t ey sh ax n pau p l iy z pau",
        ),  # pauses at the ends
        ("Where is the station please?", "w eh r ih z dh ax s t ey sh ax n p l iy z"),  # a comma wants its pause
        ("Where is the station, please?", "w eh r ih z dh ih s t ey zh ax n pau p l iy z"),  # two phones like others
        ("Where is the station, please?", "w eh ih z dh ax s t ey oy sh ax n pau p l iy z"),  # one lost, one too many
        ("Is the museum open on Monday?", "ih z dh ax m y uw z iy ax m ow p ax n aa n m ah k d iy"),
        ("Thank you! It's too hot.", "th ae ng k y uw pau ih t s t uw hh aa t"),  # two utterances in one recording
    ],
)
def test_new_texts_and_wrong_phones(decoder: WordDecoder, text: str, phones: str) -> None:
    assert decoder.decode(phones.split()) == text


@given(st.lists(st.sampled_from(["w", "eh", "r", "pau", "zh", "oy", "<unk>", "t", "uw"]), max_size=12))
@settings(max_examples=25, deadline=None)
def test_any_phones_give_some_text(decoder: WordDecoder, phones: list[str]) -> None:
    text = decoder.decode(phones)
    assert bool(text) == any(phone != "pau" for phone in phones)
    assert text == text.strip()


def test_a_long_unreadable_stretch_ends(decoder: WordDecoder) -> None:
    assert decoder.decode(["zh", "oy"] * 100)


def test_a_word_of_the_lexicon_alone_is_known_in_its_stems_case(decoder: WordDecoder) -> None:
    assert decoder.decode(say("the museum is open on mondays")) == "The museum is open on Mondays."


def test_saved_and_loaded_decoder_is_the_same(decoder: WordDecoder, tmp_path: Path) -> None:
    decoder.save(tmp_path / "model")
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["lexicon.tsv", "lm.arpa"]
    loaded = WordDecoder.load(tmp_path / "model")
    for text in SENTENCES:
        assert loaded.decode(say(text)) == text
    loaded.save(tmp_path / "again")
    for name in ("lexicon.tsv", "lm.arpa"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "model" / name).read_text()


def test_pauses_inside_a_pronunciation_belong_to_marks() -> None:
    decoder = WordDecoder.build(LEXICON | {"please": [("pau", "p", "l", "iy", "z")]}, SENTENCES)
    assert decoder.decode(say("Where is the station, please?")) == "Where is the station, please?"


def test_what_cannot_be_built_or_decoded_says_why(decoder: WordDecoder) -> None:
    with pytest.raises(InputError, match="lacks 2: aardvark, zebra"):
        WordDecoder.build(LEXICON, ["The zebra.", "The aardvark is open."])
    with pytest.raises(InputError, match="`sentences`"):
        WordDecoder.build(LEXICON, [])
    with pytest.raises(InputError, match="`phones` must be a sequence"):
        decoder.decode("w eh r")
    with pytest.raises(InputError, match="`phones` must be a sequence"):
        decoder.decode(["w", ""])
    with pytest.raises(InputError, match="at most"):
        decoder.decode(["w"] * 20_001)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("lexicon.tsv", "where w eh r\n", "word, tab, phones"),
        ("lexicon.tsv", "where\tw eh r\n", "lacks"),
        ("lexicon.tsv", b"\xff\xfe\tw\n", "UTF-8"),
        ("lm.arpa", "", "well-formed"),
        ("lm.arpa", "\\data\\\nngram 1=2\n\n\\1-grams:\n-1\t</s>\n\n\\end\\\n", "declares"),
        ("lm.arpa", "\\data\\\nngram 1=1\n\n\\1-grams:\nnan\t</s>\n\n\\end\\\n", "no 1-gram"),
        ("lm.arpa", "\\data\\\nngram 1=1\n\n\\1-grams:\n-1\thello\n\n\\end\\\n", "missing"),
        ("lm.arpa", "\\data\\\nngram 1=1\n\n\\2-grams:\n-1\ta b\n\n\\end\\\n", "not declared"),
        ("lm.arpa", None, "not a file"),
        ("lexicon.tsv", None, "not a file"),
    ],
)
def test_broken_files_are_refused(
    decoder: WordDecoder, tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    decoder.save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        WordDecoder.load(tmp_path)


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["we", "I", "Lyon", "o'clock", "twenty-one"]), min_size=1), st.sampled_from(".?!")
        ),
        min_size=1,
        max_size=3,
    )
)
def test_tokenize_and_render_are_inverse(sentences: list[tuple[list[str], str]]) -> None:
    text = " ".join(words[0][0].upper() + ", ".join(words)[1:] + mark for words, mark in sentences)
    assert render(tokenize(text)) == text


# the language model


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


def test_the_model_prefers_what_it_saw(tmp_path: Path) -> None:
    model = NGram.build([s.split() for s in ["a b c", "a b c", "a b d", "b b"]])
    assert model.sentence(["a", "b", "c"]) > model.sentence(["a", "b", "d"]) > model.sentence(["d", "c", "a"])
    model.save(tmp_path / "lm.arpa")
    loaded = NGram.load(tmp_path / "lm.arpa")
    for text in ("a b c", "d d d", ""):
        assert loaded.sentence(text.split()) == pytest.approx(model.sentence(text.split()), abs=2e-3)


def test_pruning_keeps_what_backing_off_would_miss() -> None:
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


# approximate matching


def edit_cost(word: Sequence[str], heard: Sequence[str]) -> float:
    """The textbook recurrence, one cell at a time."""
    table = {(0, 0): 0.0}
    for i, j in product(range(len(word) + 1), range(len(heard) + 1)):
        options = [table[i, j]] if (i, j) in table else []
        if i:
            options.append(table[i - 1, j] + DELETION)
        if j:
            options.append(table[i, j - 1] + INSERTION)
        if i and j:
            options.append(table[i - 1, j - 1] + substitution_cost(word[i - 1], heard[j - 1]))
        table[i, j] = min(options)
    return table[len(word), len(heard)]


PHONES = st.sampled_from(["p", "b", "s", "iy", "ih", "ax", "pau"])


@given(
    st.lists(st.lists(PHONES, min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(PHONES | st.just("??"), min_size=1, max_size=7),
)
@settings(max_examples=60, deadline=None)
def test_matches_equal_the_textbook(words: list[list[str]], heard: list[str]) -> None:
    lexicon = ApproximateLexicon((str(number), phones) for number, phones in enumerate(words))
    found = lexicon.match(heard, base=1e3, slope=0.0, extra=len(heard))
    for start in range(len(heard)):
        expected = {
            (end, str(number)): edit_cost(phones, heard[start:end])
            for end in range(start, len(heard) + 1)
            for number, phones in enumerate(words)
        }
        assert {(end, word): cost for end, word, cost in found[start]} == pytest.approx(expected, abs=1e-3)


def test_many_start_positions_go_in_groups() -> None:
    lexicon = ApproximateLexicon([("see", ["s", "iy"])])
    found = lexicon.match(["s", "iy"] * 100, base=0.0, slope=0.0)
    assert found == [[(start + 2, "see", 0.0)] if start % 2 == 0 else [] for start in range(200)]


def test_alike_phones_cost_less() -> None:
    assert 0 < substitution_cost("p", "b") < substitution_cost("p", "z") <= substitution_cost("p", "iy")
    assert substitution_cost("ih", "iy") < substitution_cost("ih", "ao")
    assert substitution_cost("ax", "ax") == 0.0


def test_a_lexicon_file_may_repeat_words(tmp_path: Path) -> None:
    (tmp_path / "lexicon.tsv").write_text("the\tdh ax\nthe\tdh iy\n", encoding="utf-8-sig")
    assert read_lexicon(tmp_path / "lexicon.tsv") == {"the": [("dh", "ax"), ("dh", "iy")]}
    (tmp_path / "lexicon.tsv").write_bytes(b"the\tdh ax\nth\xe9\tdh iy\n")
    with pytest.raises(InputError, match=r"line 2 of .*lexicon\.tsv has the byte 0xe9"):
        read_lexicon(tmp_path / "lexicon.tsv")
