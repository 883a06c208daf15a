"""Tests `mmdec.hypothesis`: texts, files of text, subtitles and recognisers, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
)

import mmdec
from mmdec.drafters.hypothesis import word_spans
from mmdec.generation.hypothesis_source import Hypothesis
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.hypothesis_call import MAX_TEXT_BYTES, read_subtitles, text_for
from tests.conftest import RATE, buzz
from tests.support.tiny_text import language_model, prompts
from tests.support.tiny_whisper import write

SRT = """\ufeff1
00:00:01,000 --> 00:00:02,500
<i>Hello there,</i>
{\\an8}how are you?

2
00:00:04,250 --> 00:00:06,000
how are you?
Fine &amp; well.
"""
VTT = """WEBVTT

STYLE
::cue { color: red }

NOTE nobody says this

first
00:01.000 --> 00:02.500 align:start
<v Ann>Hello there,
how are you?

00:04.250 --> 00:06.000
Fine &amp; well.
"""


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    return load_whisper(write(tmp_path_factory.mktemp("models") / "tiny", with_heads=False), "cpu")


def text_of(drafter: Any, at: int = 0) -> str:
    return drafter.scripts[at].text


def transcribe(whisper: LoadedWhisper, sounds: Any, drafter: Any, **options: Any) -> list[mmdec.Transcript]:
    given = {"sample_rate": RATE, "model": whisper, "language": "en", **options}
    return mmdec.transcribe(sounds, drafter=drafter, **given)


@pytest.mark.parametrize("text", ["Hello there.", "hello", "yes\nno", "", "今日は", "no/\ud800"])
def test_a_string_is_a_text(text: str) -> None:
    assert text_of(mmdec.hypothesis(text)) == text.replace("\n", " ").replace("\ud800", "")


@pytest.mark.parametrize("suffix", [".srt", ".vtt", ".txt", ".TXT"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_name_is_that_of_a_file(suffix: str, kind: Any, tmp_path: Path) -> None:
    file = tmp_path / f"talk{suffix}"
    file.write_text({".srt": SRT, ".vtt": VTT}.get(suffix, "Hello there, how are you? Fine & well."), encoding="utf-8")
    expected = "Hello there, how are you? Fine & well."
    assert text_of(mmdec.hypothesis(kind(file))) == expected
    several = mmdec.hypothesis([kind(file), "Another one."])
    assert (text_of(several, 0), text_of(several, 1)) == (expected, "Another one.")


def test_subtitles_have_times() -> None:
    for content in (SRT, VTT):
        script = read_subtitles(content)
        words = [script.text[begin:end] for begin, end in word_spans(script.text)]
        assert words[script.place_at(4.0, 9.0)] == "Fine"
        assert script.place_at(0.0, 9.0) == 0


def test_broken_subtitles_are_read_as_far_as_possible() -> None:
    assert read_subtitles("").text == ""
    assert read_subtitles("no times at all\n\nhere").text == ""
    content = "9:9:9,9 --> x\nhello\n00:00:01,000 --> 00:00:02,000\nworld"
    assert read_subtitles(content).text == "hello world"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "must be a text, the name of a file"),
        (b"text", "must be a text, the name of a file"),
        (None, "must be a text, the name of a file"),
        ([], "must hold texts or the names of files"),
        (["text", 5], "must hold texts or the names of files"),
        ("missing.srt", "does not exist"),
        (Path("missing.txt"), "does not exist"),
        ([Path("text.docx")], "must be a file that ends with .srt, .vtt, .txt"),
        (Path("no folder"), "must be a shipped name"),
    ],
)
def test_other_sources_are_refused(source: Any, message: str) -> None:
    with pytest.raises(mmdec.InputError, match=message):
        mmdec.hypothesis(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "text in UTF-8"),
        (b"a" * (MAX_TEXT_BYTES + 1), "at most"),
        (b"no times", "must hold subtitles"),
    ],
)
def test_damaged_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.srt"
    file.write_bytes(content)
    with pytest.raises(mmdec.InputError, match=message):
        mmdec.hypothesis(file)


def test_a_list_must_have_a_text_for_each_input(whisper: LoadedWhisper) -> None:
    drafter = mmdec.hypothesis(["one", "two", "three"])
    with pytest.raises(mmdec.InputError, match="a text for each of 2 inputs, but has 3"):
        transcribe(whisper, [buzz(0.5), buzz(0.6)], drafter)
    with pytest.raises(mmdec.InputError, match="a text for each of 1 inputs, but has 3"):
        transcribe(whisper, [buzz(0.5)], drafter)
    assert len(transcribe(whisper, [buzz(0.5), buzz(0.6)], mmdec.hypothesis("one for all"))) == 2


def test_a_function_hears_each_recording_once(whisper: LoadedWhisper) -> None:
    sounds: Any = [buzz(2.4, 1), buzz(0.6, 2)]
    plain = transcribe(whisper, sounds, None)
    heard = list[np.ndarray]()

    def listen(samples: np.ndarray) -> str:
        heard.append(samples)
        return plain[len(heard) - 1].text

    found = transcribe(whisper, sounds, mmdec.hypothesis(listen), batch_size=1)
    assert [transcript.tokens for transcript in found] == [transcript.tokens for transcript in plain]
    assert [len(samples) for samples in heard] == [len(sound) for sound in sounds]
    assert heard[0].dtype == np.float32
    assert heard[0].ndim == 1


@pytest.mark.parametrize("answer", [ValueError("no idea"), 5, None])
def test_a_function_that_fails_costs_the_drafts_alone(whisper: LoadedWhisper, answer: Any) -> None:
    def listen(samples: np.ndarray) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer

    (plain,) = transcribe(whisper, [buzz(0.6)], None)
    with pytest.warns(RuntimeWarning, match="decoded without drafts"):
        (found,) = transcribe(whisper, [buzz(0.6)], mmdec.hypothesis(listen))
    assert found.tokens == plain.tokens


def test_whispers_hear_by_name_and_loaded(whisper: LoadedWhisper) -> None:
    sounds: Any = [buzz(0.9, 3), buzz(1.6, 4)]
    plain = transcribe(whisper, sounds, None)
    drafters = [
        mmdec.hypothesis(whisper),
        mmdec.hypothesis(str(whisper.directory), device="cpu"),
        mmdec.hypothesis(whisper.model, processor=whisper.processor),
    ]
    for drafter in drafters:
        found = transcribe(whisper, sounds, drafter)
        assert [transcript.tokens for transcript in found] == [transcript.tokens for transcript in plain]
        assert all(transcript.timings["drafter"] > 0 for transcript in found)
    with pytest.raises(mmdec.InputError, match="`processor` must be that of the loaded model"):
        mmdec.hypothesis(whisper.model)


@pytest.fixture(scope="module")
def ctc_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small wav2vec 2.0 with random weights."""
    folder = tmp_path_factory.mktemp("models") / "ctc"
    folder.mkdir()
    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.json").write_text(str({symbol: at for at, symbol in enumerate(symbols)}).replace("'", '"'))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "conv_dim": (8, 8), "conv_stride": (20, 16), "conv_kernel": (20, 16)}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": len(symbols)}
    config = Wav2Vec2Config(**sizes, num_feat_extract_layers=2, pad_token_id=0)
    Wav2Vec2ForCTC(config).eval().save_pretrained(folder)
    return folder


def test_ctc_models_hear(whisper: LoadedWhisper, ctc_folder: Path) -> None:
    drafter = mmdec.hypothesis(ctc_folder, device="cpu")
    assert isinstance(drafter, Hypothesis)
    assert drafter.listen is not None
    text = drafter.listen(torch.from_numpy(buzz(0.9, 3)).float())
    assert text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz |<>/unk")
    model = Wav2Vec2ForCTC.from_pretrained(ctc_folder).eval()
    same = mmdec.hypothesis(model, processor=Wav2Vec2Processor.from_pretrained(ctc_folder))
    assert isinstance(same, Hypothesis)
    assert same.listen is not None
    assert same.listen(torch.from_numpy(buzz(0.9, 3)).float()) == text
    sounds: Any = [buzz(0.9, 3), buzz(2.2, 4)]
    found = transcribe(whisper, sounds, drafter)
    assert [transcript.tokens for transcript in found] == [
        transcript.tokens for transcript in transcribe(whisper, sounds, None)
    ]


def test_a_recording_has_the_text_of_its_name(tmp_path: Path) -> None:
    """Subtitles come first, because they have times."""
    recording = Path("elsewhere/talk.2.flac")
    with pytest.raises(mmdec.InputError, match=r"`draft_text` must have a text of .*talk\.2\.txt' does not exist"):
        text_for(recording, tmp_path)
    for suffix in (".txt", ".vtt", ".srt"):
        file = tmp_path / f"talk.2{suffix}"
        file.write_text("hello", encoding="utf-8")
        assert text_for(recording, tmp_path) == file


def test_a_hypothesis_can_be_pickled(whisper: LoadedWhisper) -> None:
    drafter = pickle.loads(pickle.dumps(mmdec.hypothesis(["Hello there."])))
    assert text_of(drafter) == "Hello there."
    assert drafter.is_list


def test_a_language_model_needs_a_tokenizer_and_texts() -> None:
    model: Any = language_model("llama", 1)
    with pytest.raises(mmdec.InputError, match="`tokenizer` must be given"):
        mmdec.generate(model, prompts(1), mmdec.hypothesis("hello"), max_new_tokens=4)
    with pytest.raises(mmdec.InputError, match="no sound to recognise"):
        mmdec.generate(model, prompts(1), mmdec.hypothesis(lambda samples: "hello"), max_new_tokens=4)
    with pytest.raises(mmdec.InputError, match="a text for each of 2 inputs, but has 1"):
        mmdec.generate(model, prompts(2), mmdec.hypothesis(["hello"]), max_new_tokens=4)
