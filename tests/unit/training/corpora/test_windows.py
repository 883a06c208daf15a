"""Tests windows of speech for training: utterances, sound and tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperTokenizer

from mmdec.drafters.medusa.training.data import split_long
from mmdec.errors import InputError
from mmdec.io.audio import save_audio
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.corpora.windows import (
    PLAIN,
    Composition,
    WindowPlan,
    chapters_of,
    compose,
    plan_windows,
)
from mmdec.whisper.unpadded_encoder import whisper_mel
from tests.support.tiny_whisper import build_tokenizer, generation_config

TEXTS = ["Where is the station?", "The station is near.", "Two teas, please.", "It's five o'clock."]


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return build_tokenizer(TEXTS * 10, 320)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("english")
    for split, speaker in (("train", "0001"), ("dev", "0002")):
        folder = root / split / speaker / "1"
        lines = []
        for index, text in enumerate(TEXTS):
            name = f"{speaker}-1-{index:04d}"
            seconds = 1.0 + 0.25 * index
            tone = 0.3 * torch.sin(torch.arange(int(16000 * seconds)) * 2 * torch.pi * (200 + 100 * index) / 16000)
            save_audio(folder / f"{name}.flac", tone)
            lines.append(f"{name} {text}")
        (folder / f"{speaker}-1.trans.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_the_tokenizer_is_whispers(tokenizer: WhisperTokenizer, tmp_path: Path):
    prompt = tokenizer.convert_ids_to_tokens(tokenizer("Where is it?").input_ids)
    assert prompt[:4] == ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    assert prompt[-1] == "<|endoftext|>"
    unknown = "Ōkami ate 12 œufs!"
    assert tokenizer.decode(tokenizer(unknown, add_special_tokens=False).input_ids) == unknown
    first = tokenizer.convert_tokens_to_ids("<|0.00|>")
    assert tokenizer.convert_tokens_to_ids("<|30.00|>") == first + 1500 == len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids("<|notimestamps|>") == first - 1
    tokenizer.save_pretrained(tmp_path)
    again = WhisperTokenizer.from_pretrained(tmp_path)
    assert again("The station?").input_ids == tokenizer("The station?").input_ids
    config = generation_config(tokenizer, 448)
    assert config.no_timestamps_token_id == first - 1
    assert config.lang_to_id == {"<|en|>": tokenizer.convert_tokens_to_ids("<|en|>")}


def test_utterances_of_folders_and_manifests_are_read(corpus: Path, tmp_path: Path):
    rows = read_utterances(corpus, "train")
    assert [row.text for row in rows] == TEXTS
    assert {(row.speaker, row.chapter) for row in rows} == {("0001", "0001-1")}
    assert list(chapters_of(rows)) == [[0, 1, 2, 3]]
    anywhere = Admission(allow_absolute_paths=True)
    line = {"path": str(rows[0].path), "text": "Hello.", "speaker": "a", "split": "dev"}
    (tmp_path / "m.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert [row.text for row in read_utterances(tmp_path / "m.jsonl", "dev", anywhere)] == ["Hello."]
    (tmp_path / "m.tsv").write_text(f'path\ttext\n{rows[0].path}\tHe said "no.\n', encoding="utf-8")
    assert [row.text for row in read_utterances(tmp_path / "m.tsv", admission=anywhere)] == ['He said "no.']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.jsonl", '{"text": "a"}\n', "must be a manifest"),
        ("m.jsonl", "not json\n", "must be a manifest"),
        ("m.jsonl", '{"path": "none.wav", "text": "a"}\n', "does not exist"),
        ("m.tsv", "path\ttext\n", "must hold transcripts"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_utterances(tmp_path / name)


def test_a_split_that_is_not_there_is_refused(corpus: Path):
    with pytest.raises(InputError, match="must hold a folder"):
        read_utterances(corpus, "test")
    with pytest.raises(InputError, match="must be an existing manifest"):
        read_utterances(corpus / "recordings.tsv", "train")


def test_features_are_whispers():
    samples = np.random.default_rng(0).standard_normal(480_000).astype(np.float32) * 0.1
    for mels in (80, 128):
        theirs = WhisperFeatureExtractor(feature_size=mels)(samples, sampling_rate=16000, return_tensors="pt")
        assert torch.equal(whisper_mel(torch.from_numpy(samples)[None], mels), theirs.input_features)


def test_a_window_joins_utterances_and_marks_when_they_are_spoken(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train")
    how = Composition(0, 0, 0, 1, 0, 0, 0, pause=(0.5, 0.5))
    made = compose(WindowPlan((1, 0), 7, 6.0), rows, tokenizer, how)
    assert len(made.sound) == 6 * 16000
    assert tokenizer.decode(made.tokens, decode_with_timestamps=True) == (
        "<|startoftranscript|><|en|><|transcribe|>"
        f"<|0.50|> {TEXTS[1]}<|1.76|><|2.24|> {TEXTS[0]}<|3.24|>"  # 1.25 s at 0.5 s, 1 s at 2.25 s
    )
    assert np.abs(made.sound[: 8000 - 1]).max() == 0
    assert np.abs(made.sound[8000 : 8000 + 20000]).max() > 0.05


def test_a_window_without_timestamps_begins_with_the_previous_text(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train")
    made = compose(WindowPlan((2,), 7, 6.0), rows, tokenizer, Composition(0, 0, 0, 0, 0, 1, 0))
    text = tokenizer.decode(made.tokens)
    assert text == f"<|startofprev|> {TEXTS[2]}<|startoftranscript|><|en|><|transcribe|><|notimestamps|> {TEXTS[2]}"


def test_a_window_that_ends_within_speech_gives_its_beginning_alone(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train")
    how = Composition(0, 0, 0, 1, 1, 0, 0, pause=(0.1, 0.1))
    made = compose(WindowPlan((0, 1, 2, 3), 3, 5.0), rows, tokenizer, how)  # the last is heard from 4.15 s, for 0.85 s
    assert tokenizer.decode(made.tokens, decode_with_timestamps=True).endswith(f" {TEXTS[2]}<|4.04|><|4.16|>")
    assert np.abs(made.sound[-800:]).max() > 0.05
    short = compose(WindowPlan((0, 1, 2, 3), 3, 4.5), rows, tokenizer, how)  # 0.35 s of it are too little
    assert tokenizer.decode(short.tokens, skip_special_tokens=True).strip() == " ".join(TEXTS[:3])
    assert np.abs(short.sound[-800:]).max() == 0


def test_planned_windows_are_full(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train") * 10
    seconds = [1.0, 1.25, 1.5, 1.75] * 10
    how = Composition(0, 0, 0.1, 0, 0, 0, 0, pause=(0.1, 0.4))
    for length in (6.0, 28.0):
        draw = np.random.default_rng(1)
        planned = plan_windows([list(range(40))], seconds, draw, 300.0, length, length, how.pause)
        for window in planned:
            (loud,) = np.nonzero(np.abs(compose(window, rows, tokenizer, how).sound) > 1e-3)
            assert loud[-1] / 16000 > length - 3.0  # at most the longest sentence is missing, and its pause


def test_another_voice_keeps_the_text(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train")
    window = WindowPlan((0, 1), 5, 6.0)
    own, other = (compose(window, rows, tokenizer, replace(PLAIN, voice=voice)) for voice in (0.0, 1.0))
    assert own.tokens == other.tokens
    assert own.sound.shape == other.sound.shape
    assert not np.allclose(own.sound, other.sound, atol=0.01)


def test_a_window_of_noise_alone_has_no_text(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train")
    made = compose(WindowPlan((0,), 1, 4.0), rows, tokenizer, Composition(0, 0, 0, 0, 0, 0, 1))
    assert tokenizer.decode(made.tokens, skip_special_tokens=True) == ""
    assert np.abs(made.sound).max() > 0


def test_a_window_is_determined_by_its_seed(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "train")
    items = [compose(WindowPlan((0, 1, 2), seed, 8.0), rows, tokenizer, Composition()) for seed in (1, 2, 2)]
    assert np.array_equal(items[2].sound, items[1].sound)
    assert items[2].tokens == items[1].tokens
    assert not np.array_equal(items[0].sound, items[1].sound)


def test_planned_windows_fit():
    chapters, seconds = [[0, 1, 2, 3], [4, 5, 6, 7]], [1.0, 2.0, 3.0, 9.0] * 2
    draw = np.random.default_rng(0)
    batch = plan_windows(chapters, seconds, draw, 60.0, 6.0, 7.0, (0.1, 0.5))
    assert len(batch) == round(60 / 7)
    for window in batch:
        assert window.rows
        assert 3 not in window.rows
        assert len({row // 4 for row in window.rows}) == 1
        assert sum(seconds[row] for row in window.rows) <= 6
    assert plan_windows(chapters, [9.0] * 8, draw, 7.0, 6.0, 7.0, (0.1, 0.5))[0].rows  # nothing fits: one all the same


def test_plain_windows_are_not_changed(corpus: Path, tokenizer: WhisperTokenizer):
    rows = read_utterances(corpus, "dev")
    made = compose(WindowPlan((3,), 0, 30.0), rows, tokenizer, PLAIN)
    assert tokenizer.decode(made.tokens, skip_special_tokens=True).strip() == TEXTS[3]


def own_recordings(folder: Path, speakers: list[str]) -> Path:
    """Return a manifest of short recordings without splits."""
    lines = ["path\ttext\tspeaker"]
    for number, speaker in enumerate(speakers):
        save_audio(folder / f"{number}.wav", 0.3 * torch.sin(torch.arange(8000) * (0.05 + 0.01 * number)))
        lines.append(f"{number}.wav\tSentence {number}.\t{speaker}")
    (folder / "m.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "m.tsv"


@pytest.mark.parametrize("speakers", [["a", "b", "c", "d"] * 3, ["a"] * 5, [""] * 12, ["a", "b"] * 4], ids=str)
def test_rows_without_a_split_are_divided(tmp_path: Path, speakers: list[str]) -> None:
    """No speaker on both sides; no recording, where there are too few speakers; the same ones each time."""
    file = own_recordings(tmp_path, speakers)
    train, dev = (read_utterances(file, split) for split in ("train", "dev"))
    assert (train, dev) == tuple(read_utterances(file, split) for split in ("train", "dev"))
    assert len(train) + len(dev) == len(speakers)
    assert len(train) > len(dev) > 0
    assert not {row.path for row in train} & {row.path for row in dev}
    if len(set(speakers)) > 2:
        assert not {row.speaker for row in train} & {row.speaker for row in dev}
    if len(set(speakers)) == 1:
        assert len(list(chapters_of(train))) == 1  # rows of one speaker, or of none, are joined


def test_one_recording_is_not_trained_and_tested_on(tmp_path: Path) -> None:
    file = own_recordings(tmp_path, ["a"])
    with pytest.raises(InputError, match="at least 2 recordings where no row has a `split`"):
        read_utterances(file, "train")
    assert len(read_utterances(file)) == 1


def test_long_recordings_are_cut_at_pauses(tmp_path: Path) -> None:
    """Nothing is lost, nothing twice, and the cuts lie in the pauses."""
    tone = 0.3 * torch.sin(torch.arange(16000 * 9) * 0.07)
    file = own_recordings(tmp_path, ["a", "a"])
    save_audio(tmp_path / "1.wav", torch.cat([part for _ in range(4) for part in (tone, torch.zeros(8000))]))
    rows = read_utterances(file)
    cut, seconds = split_long(rows, [0.5, 38.0], 25.0)
    assert cut[0] == rows[0]
    assert len(cut) > 2
    assert not any(row.text for row in cut[1:])
    assert max(seconds) <= 25.0
    assert sum(seconds) == pytest.approx(38.5)
    sounds = [row.samples() for row in cut]
    assert torch.equal(torch.cat(sounds[1:]), rows[1].samples())
    assert all(float(sound[-100:].abs().max()) < 1e-3 for sound in sounds[1:])
