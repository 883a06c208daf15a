"""Evaluation with translators whose answers are known, and the judge on a real recording."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import soundfile
from rich.console import Console

from mmdec.evaluation.quality.tables import table
from mmdec.evaluation.quality.translation import evaluate_speech, shuffled
from mmdec.training.corpora.cvss import read_pairs
from mmdec.training.metrics.recogniser import Recogniser, dictionary
from mmdec.types import InputError
from tests.support.tiny_corpus import TinyCorpus, phones_of, write_corpus

RECORDING = Path(__file__).parents[3] / "golden" / "where_is_the_station.flac"  # flite, voice slt
STATION = ["where is the station please", "where is the bank", "two tickets to leon please", "the station is closed"]


@dataclass(frozen=True)
class Answer:
    """What evaluation reads of a translation."""

    text: str
    units: list[str]
    audio: np.ndarray = field(default_factory=lambda: np.zeros(1600, np.float32))
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


def test_a_perfect_translator_scores_full_marks(corpus: TinyCorpus) -> None:
    oracle, lines = Oracle(corpus), []
    report = evaluate_speech(
        "dev", corpus.root, strategies=("good", "careless"), asr=False, translator=oracle, log=lines.append
    )
    good, careless = report["strategies"]["good"], report["strategies"]["careless"]
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
    assert oracle.calls[:4] == [
        (oracle.calls[0][0], name) for name in ("good", "careless") * 2
    ]  # warm-up, then in turn
    assert lines[-1] == "translated 4 of 4"
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["hardware"]["threads"] == 2
    assert report["hardware"]["cpu"]
    assert (report["hardware"]["target"], report["hardware"]["dtype"]) == (None, None)  # of a translator of the test's


def test_another_accepted_reference_is_right(corpus: TinyCorpus) -> None:
    def other(clip: Path, strategy: str) -> Answer:
        return Answer("low there", ["l", "ow", "dh", "eh", "r"])

    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "dev", scoring=True)
    place = next(place for place, row in enumerate(rows) if "Low there." in row.references)
    scores = evaluate_speech("dev", corpus.root, strategies=("x",), asr=False, translator=other)["strategies"]["x"]
    assert rows[place].translation in ("There, low.", "Low there.")
    assert scores["exact"]["value"] == pytest.approx(sum("Low there." in row.references for row in rows) / len(rows))
    assert scores["exact_one_rendering"]["value"] == 0.0


def test_refused_recordings_are_wrong_and_named(corpus: TinyCorpus) -> None:
    report = evaluate_speech("dev", corpus.root, strategies=("refusing",), asr=False, translator=Oracle(corpus))
    scores = report["strategies"]["refusing"]
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
    report = evaluate_speech("dev", spoilt.root, tiny_model, strategies=("greedy",), asr=False, device="cpu", threads=1)
    assert report["n"] == 3
    assert 2 < report["source_seconds"] < 4  # of those that can be read
    (scores,) = report["strategies"].values()
    assert list(scores["refused"]) == [clips[1].name]
    assert "libsndfile can read" in scores["refused"][clips[1].name]
    assert scores["real_time_factor"] > 0


def test_the_judge_hears_every_strategy_and_the_controls(corpus: TinyCorpus) -> None:
    report = evaluate_speech("dev", corpus.root, strategies=("good",), translator=Oracle(corpus), limit=2)
    assert report["n"] == 2
    assert report["strategies"]["good"]["asr_bleu"] == report["recordings"]["asr_bleu"]  # the same sound
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
    report = evaluate_speech(
        "dev",
        tmp_path / "nothing",
        strategies=("good",),
        common_voice=corpus.common_voice,
        cvss=cvss,
        asr=False,
        translator=Oracle(corpus),
    )
    scores = report["strategies"]["good"]
    assert report["skipped_rows"] == {
        "source recording missing or empty": ["missing.mp3"],
        "no translation": ["empty.mp3"],
    }
    assert scores["exact"]["value"] == 1.0
    assert scores["exact_several_renderings"] == {"value": None, "low": None, "high": None, "n": 0}
    assert scores["phone_error_rate"] is None
    assert "phone error rate" not in _printed(report)


def test_what_cannot_be_evaluated_says_why(corpus: TinyCorpus, tmp_path: Path) -> None:
    oracle = Oracle(corpus)
    with pytest.raises(InputError, match=r"`nope\.tsv` must exist"):
        evaluate_speech("nope", corpus.root, translator=oracle)
    with pytest.raises(InputError, match="`limit` must be at least 1"):
        evaluate_speech("dev", corpus.root, limit=0, translator=oracle)
    with pytest.raises(InputError, match="`strategy` must be one of"):
        evaluate_speech("dev", corpus.root, strategies=("lookahead", "guessing"), asr=False)
    with pytest.raises(InputError, match="`strategies`"):
        evaluate_speech("dev", corpus.root, strategies=(), translator=oracle)
    (tmp_path / "cvss_c").mkdir()
    (tmp_path / "cvss_c" / "dev.tsv").write_text("a.mp3\tHello.\n")
    with pytest.raises(InputError, match="must hold usable rows"):
        evaluate_speech("dev", tmp_path, translator=oracle)


def test_a_model_directory_is_scored_through_the_public_call(corpus: TinyCorpus, tiny_model: Path) -> None:
    report = evaluate_speech("dev", corpus.root, tiny_model, limit=1, asr=False, threads=1)
    assert list(report["strategies"]) == ["lookahead", "autoregressive", "verified"]
    assert (report["hardware"]["target"], report["hardware"]["dtype"]) == ("cpu", "float32")
    for scores in report["strategies"].values():
        assert not scores["refused"]
        assert {"encoder", "linguistic", "vocoder", "words", "wav to wav"} <= scores["latency"].keys()
        assert scores["real_time_factor"] > 0


def test_shuffled_moves_every_item() -> None:
    for count in range(2, 9):
        items = [str(number) for number in range(count)]
        assert sorted(shuffled(items)) == items
        assert all(before != after for before, after in zip(items, shuffled(items), strict=True))


@pytest.fixture(scope="module")
def judge() -> Recogniser:
    return Recogniser(STATION, {"leon": [["l", "ey", "ax", "n"]], "qwerty": [["k", "w"]]})


def test_the_judge_hears_a_real_recording_and_nothing_in_noise(judge: Recogniser) -> None:
    samples, rate = soundfile.read(RECORDING, dtype="float32")
    noise = 0.1 * np.random.default_rng(0).standard_normal(rate)
    assert judge.transcribe(samples, rate) == "where is the station please"
    assert judge.transcribe(noise) != judge.transcribe(samples)
    assert judge.transcribe(0.01 * samples) == "where is the station please"  # what came before leaves no trace
    assert judge.transcribe(np.zeros(16_000)) == ""
    assert judge.transcribe(np.zeros(0)) == ""


def test_the_judge_takes_only_its_own_kind_of_sound(judge: Recogniser) -> None:
    with pytest.raises(InputError, match="must be 16000 Hz"):
        judge.transcribe(np.zeros(8000), 8000)
    with pytest.raises(InputError, match="finite"):
        judge.transcribe(np.array([np.nan]))
    with pytest.raises(InputError, match="shape"):
        judge.transcribe(np.zeros((2, 100)))


def test_the_published_dictionary_goes_first(tmp_path: Path) -> None:
    published = tmp_path / "words.dict"
    published.write_text("the DH AH\nthe(2) DH IY\nother AH DH ER\n")
    ours = {"the": [["d", "ax"]], "lyon": [["l", "ay", "ax", "n", "pau"]], "odd": [["??"]]}
    assert dictionary(["the", "lyon", "odd", "new"], ours, published) == {
        "the": [["DH", "AH"], ["DH", "IY"]],
        "lyon": [["L", "AY", "AH", "N"]],
    }


def test_words_that_nobody_can_say_are_named() -> None:
    assert Recogniser(["the qqqq station"], {}).unknown == ("qqqq",)


def test_a_missing_recogniser_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(InputError, match=r"pip install mmdec\[eval\]"):
        Recogniser(STATION, {})


def _printed(report: dict) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(report))
    return capture.get()
