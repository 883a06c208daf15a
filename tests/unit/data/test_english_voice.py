"""Tests the English voice's data: the choice of sentences, continuing after a kill, words and rules of the lexicon."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import english_voice
import letter_rules

from mmdec.daspeech.training.acoustic import EnglishSpeech
from mmdec.phonetics.spelling import Speller

flite = pytest.mark.skipif(shutil.which("flite") is None, reason="flite speaks")


@pytest.fixture
def pairs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "everyday", tmp_path / "phrasebook"]
    for folder, texts in zip(folders, (["I see a cat.", "Tom's here."], ["Where is it?"]), strict=True):
        folder.mkdir()
        for split in ("train", "dev", "test"):
            rows = [f"{n}\t{n}\tUne phrase.\t{text if split == 'train' else split}\n" for n, text in enumerate(texts)]
            rows.append(f"x\tx\tLong.\t{'Very ' * 20}long.\tHello{split}!\n")
            (folder / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    return folders


def test_training_sentences_alone_are_chosen_and_long_ones_left_out(pairs: list[Path]) -> None:
    chosen = english_voice.chosen_texts(pairs, 32)
    assert sorted(chosen) == ["Hellotrain!", "I see a cat.", "Tom's here.", "Where is it?"]
    assert english_voice.chosen_texts(pairs, 8)[0] in ("Hellotrain!", "Where is it?")  # an eighth of the second folder


def test_recording_goes_on_where_it_ended(pairs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: list[str] = []

    def speak(text: str, path: Path) -> str:
        if text == "Where is it?" and len(spoken) < 3:
            raise RuntimeError("flite gave no sound")
        spoken.append(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"RIFF")
        return "pau:0.1 ax:0.2 pau:0.3"

    monkeypatch.setattr(english_voice, "synthesise", speak)
    texts = english_voice.chosen_texts(pairs, 32)
    out = tmp_path / "out"
    (failed,) = english_voice.record(out, ["Where is it?", *texts], 1)[:1]
    assert failed.startswith("Where is it?")
    assert english_voice.record(out, texts, 2) == []
    assert sorted(spoken) == sorted(texts)  # each once
    rows = [line.split("\t") for split in ("train", "dev") for line in (out / f"{split}.tsv").read_text().splitlines()]
    assert sorted(text for _, text in rows) == sorted(texts)
    assert len({name for name, _ in rows}) == len(texts)


WORDS = (
    "cat k ae t|can k ae n|cane k ey n|cape k ey p|cap k ae p|tap t ae p|tape t ey p|knit n ih t|knee n iy|box b aa k s"
)


def test_letters_and_phones_are_aligned() -> None:
    words = [(entry.split()[0], tuple(entry.split()[1:])) for entry in WORDS.split("|")]
    aligned = dict(letter_rules.align(words))
    assert aligned["cape"] == [("k",), ("ey",), ("p",), ()]
    assert aligned["knit"] == [(), ("n",), ("ih",), ("t",)]
    assert aligned["box"] == [("b",), ("aa",), ("k", "s")]
    assert letter_rules.align([("a", ("ey", "b", "iy"))]) == []  # more phones than a letter can say


def test_letter_to_sound_rules_reproduce_their_words() -> None:
    words = [(entry.split()[0], tuple(entry.split()[1:])) for entry in WORDS.split("|")]
    rules = letter_rules.learn(words)
    speller = Speller({}, {name: tuple(p for p in phones if p != "-") for name, phones in rules.items()})
    assert [speller.by_rules(word) for word, _ in words] == [phones for _, phones in words]
    assert speller.by_rules("caned") == ("k", "ey", "n")  # no rule for d


@flite
def test_flite_records_and_lists_what_it_says(pairs: list[Path], tmp_path: Path) -> None:
    out, lexicon = tmp_path / "out", tmp_path / "pronunciation.tsv"
    texts = english_voice.chosen_texts(pairs, 32)
    assert english_voice.record(out, texts, 1) == []
    recorded = {text: phones for text, (phones,) in english_voice.read_journal(out / english_voice.JOURNAL).items()}
    english_voice.write_lexicon(lexicon, english_voice.training_texts(pairs), recorded)
    speller = Speller.read(lexicon)
    for text in ("I see a cat.", "Tom's here.", "Where is it?"):
        assert speller.phones(text) == english_voice.phones_in(recorded[text])
    phones = "ae t th r iy th er d iy t aa m s iy z t w eh l v k ae t s"
    assert " ".join(speller.phones("At 3:30 Tom sees 12 cats.")) == phones
    assert "long" in speller.lexicon
    assert "hellodev" not in speller.lexicon
    speech = EnglishSpeech(out, "train")
    assert speech.bad.count == 0
