"""Tests the evaluation of speech translation with translators of known output."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
from rich.console import Console

from mmdec.cli.evaluate import speech_table
from mmdec.errors import InputError
from mmdec.evaluation.translation import (
    ComparedSystems,
    cvss_corpus,
    evaluate_speech,
    manifest_corpus,
    own_systems,
    shift_by_half,
)
from mmdec.training.corpora.cvss import read_pairs
from tests.conftest import buzz
from tests.support.tiny_corpus import TinyCorpus, phones_of, write_corpus

MACHINE = {"cpu": "none", "threads": 2, "dtype": None, "batch": 1}


@dataclass(frozen=True)
class Answer:
    """The fields of a translation that evaluation reads."""

    text: str
    units: list[str]
    audio: np.ndarray | None = field(default_factory=lambda: np.zeros(1600, np.float32))
    sample_rate: int = 16_000
    timings: dict[str, float] = field(default_factory=lambda: {"encoder": 0.01, "linguistic": 0.02})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny", dev=4)


@dataclass
class Oracle:
    """Says the recorded translation, or a spoilt one for the strategy "careless"."""

    corpus: TinyCorpus
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, clip: Path, strategy: str) -> Answer:
        self.calls.append((clip.name, strategy))
        with (self.corpus.cvss / "dev.tsv").open(encoding="utf-8") as file:
            text = dict(csv.reader(file, delimiter="\t"))[clip.name]
        if strategy == "careless":
            return Answer("Low.", ["l", "ow"])
        if strategy == "refusing":
            raise InputError("`audio` must be better, but is bad. Record it again.")
        samples, rate = soundfile.read(self.corpus.cvss / "dev" / f"{clip.name}.wav", dtype="float32")
        return Answer(text, phones_of(text)[1:-1], samples, rate)


def systems(translator: Callable[[Path, str], Answer], *names: str) -> ComparedSystems:
    return ComparedSystems("injected", {name: partial(translator, strategy=name) for name in names}, MACHINE)


def test_a_perfect_translator_scores_full_marks(corpus: TinyCorpus) -> None:
    oracle, lines = Oracle(corpus), []
    report = evaluate_speech(cvss_corpus("dev", corpus.root), systems(oracle, "good", "careless"), log=lines.append)
    good, careless = report["systems"]["good"], report["systems"]["careless"]
    assert report["n"] == 4
    assert good["exact"]["value"] == 1.0
    assert good["exact"]["n"] == good["exact_one_rendering"]["n"] + good["exact_several_renderings"]["n"]
    assert good["phone_error_rate"]["value"] == good["phone_error_rate_nearest"]["value"] == 0.0
    assert good["bleu"]["value"] == pytest.approx(100.0)
    assert good["latency"]["encoder"] == {"median": 0.01, "p90": 0.01}
    assert good["latency"]["wav to wav"]["median"] > 0
    assert careless["exact"]["value"] == 0.0
    assert careless["phone_error_rate"]["value"] > 0.5
    assert careless["phone_error_rate_nearest"]["value"] <= careless["phone_error_rate"]["value"]
    assert careless["bleu"]["value"] < 20
    assert good["bleu"]["p"] is None  # the others are tested against it
    assert careless["bleu"]["p"] < 0.05
    assert careless["chrf"]["low"] <= careless["chrf"]["value"] <= careless["chrf"]["high"]
    # warm-up, then in turn
    assert oracle.calls[:4] == [(oracle.calls[0][0], name) for name in ("good", "careless") * 2]
    assert lines[-1] == "translated 4 of 4"
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["hardware"] == MACHINE
    assert [row["careless"] for row in report["texts"]] == ["Low."] * 4


def test_another_accepted_reference_is_right(corpus: TinyCorpus) -> None:
    def other(clip: Path, strategy: str) -> Answer:
        return Answer("low there", ["l", "ow", "dh", "eh", "r"])

    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "dev", scoring=True)
    place = next(place for place, row in enumerate(rows) if "Low there." in row.references)
    scores = evaluate_speech(cvss_corpus("dev", corpus.root), systems(other, "x"))["systems"]["x"]
    assert rows[place].translation in ("There, low.", "Low there.")
    assert scores["exact"]["value"] == pytest.approx(sum("Low there." in row.references for row in rows) / len(rows))
    assert scores["exact_one_rendering"]["value"] == 0.0


def test_refused_recordings_are_wrong_and_named(corpus: TinyCorpus) -> None:
    report = evaluate_speech(cvss_corpus("dev", corpus.root), systems(Oracle(corpus), "refusing"))
    scores = report["systems"]["refusing"]
    assert scores["exact"]["value"] == 0.0
    assert len(scores["refused"]) == 4
    assert all("Record it again" in message for message in scores["refused"].values())
    assert scores["phone_error_rate"]["value"] == 1.0
    assert scores["real_time_factor"] is None
    json.dumps(report, allow_nan=False)
    assert "refused" in _printed(report)


def test_a_damaged_recording_is_named_and_the_others_are_scored(tiny_model: Path, tmp_path: Path) -> None:
    spoilt = write_corpus(tmp_path / "corpus", recordings=1, dev=3)
    clips = sorted(spoilt.common_voice.glob("clips/*.mp3"))[-3:]
    clips[1].write_bytes(b"no sound at all" * 100)
    own = own_systems(tiny_model, ("greedy",), "cpu", 1)
    report = evaluate_speech(cvss_corpus("dev", spoilt.root), own)
    assert report["n"] == 3
    assert 2 < report["source_seconds"] < 4  # of those that can be read
    (scores,) = report["systems"].values()
    assert list(scores["refused"]) == [clips[1].name]
    assert "libsndfile can read" in scores["refused"][clips[1].name]
    assert scores["real_time_factor"] > 0


def test_the_judge_hears_every_strategy_and_the_controls(corpus: TinyCorpus) -> None:
    spoken = cvss_corpus("dev", corpus.root, limit=2)
    report = evaluate_speech(spoken, systems(Oracle(corpus), "good"), Hearer())
    assert report["n"] == 2
    assert report["systems"]["good"]["asr_bleu"]["value"] == report["recordings"]["asr_bleu"]  # the same sound
    assert report["systems"]["good"]["asr_bleu_ratio"] in (1.0, None)
    assert report["recogniser"]["name"] == "counter"
    assert report["asr_bleu_noise"] < 5
    assert "tok:13a" in report["recordings"]["signature"]
    printed = _printed(report)
    for words in ("exact sentences", "ASR-BLEU", "noise", "nrefs", "2 threads"):
        assert words in printed


def test_a_plain_cvss_layout_needs_no_tables_of_ours(corpus: TinyCorpus, tmp_path: Path) -> None:
    cvss = tmp_path / "cvss_c_fr_en_v1.0"
    (cvss / "dev").mkdir(parents=True)
    (cvss / "dev.tsv").write_bytes((corpus.cvss / "dev.tsv").read_bytes() + b"missing.mp3\tGone.\nempty.mp3\t\n")
    for wav in (corpus.cvss / "dev").iterdir():
        (cvss / "dev" / wav.name).write_bytes(wav.read_bytes())
    spoken = cvss_corpus("dev", tmp_path / "nothing", common_voice=corpus.common_voice, cvss=cvss)
    report = evaluate_speech(spoken, systems(Oracle(corpus), "good"))
    scores = report["systems"]["good"]
    assert report["skipped_rows"] == {
        "source recording missing or empty": ["missing.mp3"],
        "no translation": ["empty.mp3"],
    }
    assert scores["exact"]["value"] == 1.0
    assert scores["exact_several_renderings"] == {"value": None, "low": None, "high": None, "n": 0}
    assert scores["phone_error_rate"] is None
    assert "phone error rate" not in _printed(report)


def test_impossible_evaluations_say_why(corpus: TinyCorpus, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`nope\.tsv` must exist"):
        cvss_corpus("nope", corpus.root)
    with pytest.raises(InputError, match="`limit` must be at least 1"):
        cvss_corpus("dev", corpus.root, limit=0)
    with pytest.raises(InputError, match="`strategy` must be one of"):
        own_systems(tiny_model, ("lookahead", "guessing"))
    with pytest.raises(InputError, match="`strategies`"):
        own_systems(tiny_model, ())
    (tmp_path / "cvss_c").mkdir()
    (tmp_path / "cvss_c" / "dev.tsv").write_text("a.mp3\tHello.\n")
    with pytest.raises(InputError, match="must hold usable rows"):
        cvss_corpus("dev", tmp_path)


def test_a_model_directory_is_scored_through_the_public_call(corpus: TinyCorpus, tiny_model: Path) -> None:
    report = evaluate_speech(cvss_corpus("dev", corpus.root, limit=1), own_systems(tiny_model, threads=1))
    assert list(report["systems"]) == ["beam", "lookahead", "reranked", "autoregressive", "verified"]
    assert (report["hardware"]["target"], report["hardware"]["dtype"]) == ("cpu", "float32")
    for scores in report["systems"].values():
        assert not scores["refused"]
        assert {"encoder", "linguistic", "vocoder", "words", "wav to wav"} <= scores["latency"].keys()
        assert scores["real_time_factor"] > 0


@dataclass
class Hearer:
    """Hears the number of samples, in figures."""

    name: str = "counter"
    heard: list[int] = field(default_factory=list)

    def transcribe(self, samples: np.ndarray) -> str:
        self.heard.append(len(samples))
        return f"{len(samples)}."


def natural(folder: Path, lengths: Mapping[str, int]) -> Path:
    """Return a manifest of sounds of so many samples, and the folder of pairs `said` beside it."""
    (folder / "said").mkdir()
    rows, pairs = ["id\tpath\tsplit\tspeaker\tspeed\tseconds\ttext"], []
    for name, size in lengths.items():
        soundfile.write(folder / f"said-{name}.wav", buzz(size / 16_000)[:size], 16_000)
        rows.append(f"said-{name}\tsaid-{name}.wav\ttest\tsomeone\t1\t1\tPhrase {name}.")
        pairs.append(f"{name}\tgroup\tPhrase {name}.\tSentence {name}.\tI said {name} to you.")
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "said" / "test.tsv").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    return folder / "manifest.tsv"


def test_a_manifest_is_scored_against_the_pairs_that_were_read_aloud(tmp_path: Path) -> None:
    manifest = natural(tmp_path, {"one": 8000, "two": 12_000, "three": 16_000})
    corpus = manifest_corpus("test", manifest, [tmp_path / "said"])
    assert [row.references[0] for row in corpus.rows] == ["Sentence one.", "Sentence two.", "Sentence three."]

    def speaks(clip: Path) -> Answer:
        number = clip.stem.removeprefix("said-")
        sizes = {"one": 24, "two": 1000, "three": 21}
        return Answer(f"I said {number} to you.", [], np.ones(sizes[number], np.float32))

    def writes(clip: Path) -> Answer:
        return Answer("i said one to you", [], None)

    both = ComparedSystems("injected", {"ours": speaks, "theirs": writes}, MACHINE).with_others({"again": speaks})
    hearer = Hearer()
    report = evaluate_speech(corpus, both, hearer)
    assert hearer.heard == [24, 1000, 21]  # the same sound is heard once
    assert report["systems"]["again"]["asr_bleu"]["value"] == report["systems"]["ours"]["asr_bleu"]["value"]
    ours, theirs = report["systems"]["ours"], report["systems"]["theirs"]
    assert ours["bleu"]["value"] == pytest.approx(100)
    assert theirs["bleu"]["value"] < 60  # case and marks count
    assert theirs["bleu"]["p"] < 0.05
    assert ours["phone_error_rate"] is None
    assert "asr_bleu" in ours
    assert "asr_bleu" not in theirs  # it has no voice
    assert [row["ours, heard"] for row in report["texts"]] == ["24.", "1000.", "21."]
    assert "recordings" not in report
    printed = _printed(report)
    for words in ("ours", "theirs", "ASR-BLEU", "counter", "numbers in words", "paired bootstrap against ours"):
        assert words in printed
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_numbers_are_scored_as_spoken_words(tmp_path: Path) -> None:
    manifest = natural(tmp_path, {"x": 8000})
    (tmp_path / "said" / "test.tsv").write_text("x\tg\tVingt-quatre.\tTwenty-four thousand and one hundred!\n")
    corpus = manifest_corpus("test", manifest, [tmp_path / "said"])

    class Figures(Hearer):
        def transcribe(self, samples: np.ndarray) -> str:
            return "24 thousand and 100"

    report = evaluate_speech(corpus, systems(lambda clip, strategy: Answer("?", [], np.ones(9)), "ours"), Figures())
    assert report["systems"]["ours"]["asr_bleu"]["value"] == pytest.approx(100)


def test_missing_pairs_of_a_manifest_are_named(tmp_path: Path) -> None:
    manifest = natural(tmp_path, {"one": 8000, "two": 8000})
    (tmp_path / "said" / "test.tsv").write_text("one\tgroup\tPhrase one.\tSentence one.\n")
    with pytest.raises(InputError, match=r"`text` must hold the sentences of the corpus, but lacks 'said-two', 1"):
        manifest_corpus("test", manifest, [tmp_path / "said"])
    with pytest.raises(InputError, match="`limit` must be at least 1"):
        manifest_corpus("test", manifest, [tmp_path / "said"], limit=0)
    with pytest.raises(InputError, match=r"no recording of .* begins with .* Its first is 'said-one'"):
        manifest_corpus("test", manifest, [])


def test_the_folders_of_pairs_choose_the_recordings(tmp_path: Path) -> None:
    manifest = natural(tmp_path, {"one": 8000, "two": 8000})
    soundfile.write(tmp_path / "read-one.wav", buzz(0.5), 16_000)
    with manifest.open("a", encoding="utf-8") as file:
        file.write("read-one\tread-one.wav\ttest\tsomeone\t1\t1\tPhrase.\n")
    (tmp_path / "unread").mkdir()  # whose tables are not missed
    (tmp_path / "read").mkdir()
    (tmp_path / "read" / "test.tsv").write_text("one\tg\tPhrase.\tAnother one.\n", encoding="utf-8")
    chosen = {
        folders: [row.references[0] for row in manifest_corpus("test", manifest, [tmp_path / f for f in folders]).rows]
        for folders in (("said",), ("read",), ("said", "read"), ("said", "unread"))
    }
    assert chosen == {
        ("said",): ["Sentence one.", "Sentence two."],
        ("read",): ["Another one."],
        ("said", "read"): ["Sentence one.", "Sentence two.", "Another one."],
        ("said", "unread"): ["Sentence one.", "Sentence two."],
    }


def test_shuffling_moves_every_item() -> None:
    for count in range(2, 9):
        items = [str(number) for number in range(count)]
        assert sorted(shift_by_half(items)) == items
        assert all(before != after for before, after in zip(items, shift_by_half(items), strict=True))


def _printed(report: dict) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(speech_table(report))
    return capture.get()
