"""Which patch a token of an answer reads, by examples that a person can follow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmdec.training.corpora.image_text import Conversation
from mmdec.training.vlm.data import Rows, SceneData
from mmdec.training.vlm.tokens import NOWHERE, Encoded, answered, asked, build_tokenizer, encode, patches_read
from mmdec.types import InputError

PRINTS = [("SOUP", [8, 8, 9, 9]), ("4.50", [14, 14, 15, 15]), ("TEA", [16, 16, 17])]
_ = NOWHERE


def read(answer: str, prints: list[tuple[str, list[int]]]) -> list[int]:
    """The patch of each token: a character, with the space before it."""
    ends = [at + 1 for at, letter in enumerate(answer) if letter != " "]
    return patches_read(answer, list(zip([0, *ends], ends, strict=False)), prints).tolist()


def test_a_word_and_a_price_are_read_where_they_are_printed() -> None:
    #           S  O  U  P  i  s   4   .   5   0  .
    expected = [8, 8, 9, 9, _, _, 14, 14, 15, 15, _]
    assert read(" SOUP is 4.50.", PRINTS) == read("SOUP is 4.50.", PRINTS) == expected


def test_a_token_reads_its_first_character() -> None:
    tokens = [(0, 3), (3, 5), (5, 8), (8, 10), (10, 14)]
    assert patches_read(" SOUP is 4.50.", tokens, PRINTS).tolist() == [8, 9, _, 14, 14]


def test_what_is_printed_twice_is_left_out() -> None:
    for second in ("TEA", "TEA ROOM", "GREEN TEA"):
        prints = [*PRINTS, (second, [1] * len(second))]
        assert read(" TEA, not SOUP", prints) == [*[_] * 7, 8, 8, 9, 9], second
    assert read(" TEA", [*PRINTS, ("STEAM", [1] * 5), ("TEAS", [1] * 4)]) == [16, 16, 17]  # other words


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" Soup", [_] * 4),  # not as it is printed
        (" soup", [_] * 4),
        (" SOUPS", [_] * 5),
        (" 14.50", [_] * 5),
        (" 4.5", [_] * 3),
        (" A 3", [_, 5]),  # a letter alone is the article
        (" EXIT", [7, 7, _, _]),  # half of it lies outside the picture
        (" 09:30, B-7", [20, 20, 20, 21, 21, _, 30, 31, 31]),
        (" SOUP ROOM", [8, 8, 9, 9, _, _, _, _]),  # the second is not printed
    ],
)
def test_examples(answer: str, expected: list[int]) -> None:
    more = [("A", [3]), ("3", [5]), ("EXIT", [7, 7, -1, -1]), ("09:30", [20, 20, 20, 21, 21]), ("B-7", [30, 31, 31])]
    assert read(answer, [*PRINTS, *more]) == expected


def test_a_corpus_keeps_patches_beside_its_answers_tokens(tmp_path: Path) -> None:
    turns = (("What is 4.50?", "SOUP is 4.50."), ("Is it TEA?", "Yes."), ("Which TEA?", "It is TEA."))
    notes = {"prints": [["SOUP", [8, 8, 9, 9]], ["4.50", [14, 14, 15, 15]], ["TEA", [16, 16, 17]]]}  # as JSON has it
    talks = [
        Conversation("a", (Path("a.png"),), turns, notes),
        Conversation("b", (Path("b.png"),), (("What?", "SOUP."),), {}),  # a corpus without prints
    ]
    tokenizer = build_tokenizer([text for turn in turns for text in (asked(turn[0]), answered(turn[1]))] * 3, 400)
    path = tmp_path / "kept.npz"
    encode(talks, tokenizer).save(path)
    kept = Encoded.load(path)
    assert len(kept) == 2
    found = []
    for number, talk in enumerate(talks):
        for (question, answer), (first, second, patches) in zip(talk.turns, kept.turns(number), strict=True):
            assert first.tolist() == tokenizer(asked(question))["input_ids"]
            assert second.tolist() == tokenizer(answered(answer))["input_ids"]
            assert patches.shape == second.shape
            units = tokenizer.convert_ids_to_tokens(second.tolist())
            pairs = zip(units, patches.tolist(), strict=True)
            found.append([(unit, patch) for unit, patch in pairs if patch != NOWHERE])
    assert found == [
        [("ĠS", 8), ("O", 8), ("U", 9), ("P", 9), ("Ġ4", 14), (".", 14), ("5", 15), ("0", 15)],
        [],
        [("ĠT", 16), ("E", 16), ("A", 17)],
        [],
    ]
    everything = np.concatenate([patches for n in range(2) for *_, patches in kept.turns(n)])
    assert (kept.patches != NOWHERE).sum() == (everything != NOWHERE).sum()  # a question reads nothing


def test_pictures_with_print_are_a_share_of_a_pass(tmp_path: Path) -> None:
    rows = [
        {
            "id": number,
            "image": f"{number}.png",
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It says 5."}],
            "prints": [["5", [0]]] if number < 6 else [],
        }
        for number in range(20)
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")

    def order(share: float | None, lap: int = 0) -> list[int]:
        data = SceneData(str(tmp_path), str(tmp_path / "tokenizer"), 300, patches=4, printed_share=share)
        return data.order(lap, data.lap_length()).tolist()

    assert sorted(order(None)) == list(range(20))
    assert sorted(order(1.0)) == list(range(6))
    for lap in range(3):
        taken = order(0.6, lap)
        assert set(range(6)) < set(taken)
        assert len(taken) == len(set(taken)) == 10
    assert set(order(0.6, 0)) != set(order(0.6, 1))  # other pictures without print in each pass
    assert len(order(0.1)) == 20  # no more than there are
    for wrong in (0.0, 1.5):
        with pytest.raises(InputError, match=f"`printed_share` must be above 0 and up to 1, but is {wrong}"):
            order(wrong)
    for row in rows:
        row["prints"] = []
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    assert sorted(order(0.6)) == list(range(20))  # a corpus without print is read whole


def test_questions_that_are_answered_by_reading_come_first(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    size, reading = 20, {3, 8, 15}
    tokens = np.repeat(np.arange(10, 10 + size, dtype=np.uint16), 2)  # a question and an answer of one token each
    patches = np.full(2 * size, NOWHERE, np.uint8)
    patches[[2 * turn + 1 for turn in reading]] = 1
    bounds = np.arange(2 * size).reshape(size, 2) + 1
    encoded = Encoded(tokens, patches, bounds, np.array([0, size]), np.array([str(tmp_path / "a.png")]))

    def asked(prefer: float, seed: int) -> list[int]:
        rows = Rows(encoded, np.zeros((1, 4, 8, 2), np.uint8), 32, np.arange(4), 10, 2, prefer)
        return [token - 10 for token in rows[0, seed][1][4::2].tolist()]

    assert all(set(asked(1.0, seed)) == reading for seed in range(5))  # three questions fit
    share = [sum(len(reading & set(asked(prefer, seed))) for seed in range(100)) for prefer in (0.0, 0.5)]
    assert 25 < share[0] < 65  # of 300: as drawn it is three of twenty
    assert 1.4 * share[0] < share[1] < 250
    assert asked(0.5, 7) == asked(0.5, 7) != asked(0.5, 8)
