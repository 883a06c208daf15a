"""Tests a CTC drafter's training: its transcripts are the model's, and its evaluation counts passes as in decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.verify import MatchRule
from mmdec.drafters.ctc.checkpoint import read_ctc
from mmdec.drafters.ctc.drafter import CtcDrafter
from mmdec.drafters.ctc.network import CtcHead, CtcHeadConfig
from mmdec.drafters.ctc.tokens import SEGMENT_END
from mmdec.drafters.ctc.training import measure as drafts
from mmdec.drafters.ctc.training.data import NO_DISTORTION
from mmdec.drafters.ctc.training.module import CtcModule
from mmdec.drafters.ctc.training.transcripts import (
    JoinedWindow,
    TranscriptData,
    WindowTranscriber,
    join_windows,
    keep_transcripts,
    labels,
)
from mmdec.drafters.medusa.training.data import decode_greedily
from mmdec.io.audio import save_audio
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.stores import FrameStore, TokenStore
from mmdec.types import Plan
from mmdec.whisper.target import WhisperTarget, generate_processors
from tests.support.tiny_whisper import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whisper/, manifest.tsv with clips/: six for training, two of dev."""
    root = tmp_path_factory.mktemp("drafts")
    write(root / "whisper", with_heads=False)
    lines = ["id\tpath\tsplit\tspeaker\ttext"]
    for number in range(8):
        draw = torch.Generator().manual_seed(number)
        save_audio(root / "clips" / f"{number}.wav", 0.1 * torch.randn(9000 + 700 * number, generator=draw))
        lines.append(f"{number}\tclips/{number}.wav\t{'dev' if number > 5 else 'train'}\tx\tHello there, 1 2.")
    (root / "manifest.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def data(folder: Path) -> TranscriptData:
    corpora = {str(folder / "manifest.tsv"): "en"}
    made = TranscriptData(corpora, str(folder / "whisper"), str(folder / "kept"), str(folder / "pieces.json"), 300)
    made.setup("fit")
    return made


def test_a_transcript_is_what_plain_decoding_gives(folder: Path, data: TranscriptData) -> None:
    transcriber = WindowTranscriber(data.whisper)
    for window in data.windows["dev"]:
        _, states, text = next(iter(transcriber.transcribe([window], NO_DISTORTION)))
        whole = transcriber.states([window.sound(NO_DISTORTION)])
        plain = decode_greedily(data.whisper.model, whole, [transcriber.prompt("en")], [True], 220)
        assert data.transcripts.get(window.name) == text == plain[0]
        torch.testing.assert_close(data.store.get(window.name), whole[0, : len(states)], rtol=2e-2, atol=2e-2)


def test_most_augmented_windows_end_with_little_silence(folder: Path, data: TranscriptData, tmp_path: Path) -> None:
    """Each fourth batch of augmented windows is padded to 30 s."""
    rows = read_utterances(folder / "manifest.tsv", "train")
    windows = [JoinedWindow((row,), "en", view) for row in rows for view in (1, 2, 3)]
    asked = list[bool]()
    transcribe = WindowTranscriber.transcribe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowTranscriber, "transcribe", lambda *given: asked.append(given[-1]) or transcribe(*given))
        store, transcripts = FrameStore(tmp_path / "states", data.store.width), TokenStore(tmp_path / "transcripts")
        keep_transcripts(windows, data.whisper, store, transcripts, NO_DISTORTION)
    assert asked == [True, False, False, False, True]
    assert all(window.name in store and transcripts.get(window.name) is not None for window in windows)


def test_a_transcript_without_an_end_is_empty(data: TranscriptData, monkeypatch: pytest.MonkeyPatch) -> None:
    transcriber, window = WindowTranscriber(data.whisper), data.windows["dev"][0]
    monkeypatch.setattr("mmdec.drafters.ctc.training.transcripts.MAX_TRANSCRIPT_TOKENS", 2)
    assert next(iter(transcriber.transcribe([window], NO_DISTORTION)))[2] == []


def test_a_known_text_is_taken_where_the_model_agrees(folder: Path, data: TranscriptData) -> None:
    """Tokens with letters are the known text's; where fewer agree than are asked for there is no transcript."""
    transcriber, window = WindowTranscriber(data.whisper), data.windows["dev"][0]
    result = transcriber.check_known_text(window, NO_DISTORTION, 0.0)
    assert result is not None
    name, states, text = result
    whole = transcriber.states([window.sound(NO_DISTORTION)])[0, : len(states)]
    assert name == window.name
    assert 0 < len(states) <= 1500
    assert states.shape[1] == whole.shape[1]
    decode = data.whisper.tokenizer.decode
    known = data.whisper.tokenizer.encode(" " + window.text, add_special_tokens=False)
    spoken = [
        [t for t in row if t < transcriber.first_time and any(map(str.isalnum, decode([t])))] for row in (text, known)
    ]
    assert spoken[0] == spoken[1][: len(spoken[0])]
    assert len(spoken[0]) > 2
    assert transcriber.check_known_text(window, NO_DISTORTION, 1.01) is None


def test_windows_join_short_recordings(folder: Path) -> None:
    rows = read_utterances(folder / "manifest.tsv", "train")
    windows = join_windows(rows * 9, "en", 1, 0)
    assert [row for window in windows for row in window.rows] == rows * 9
    assert 1 < len(windows) < 30
    assert windows == join_windows(rows * 9, "en", 1, 0) != join_windows(rows * 9, "en", 2, 0)


def test_labels_have_a_mark_between_segments(data: TranscriptData) -> None:
    first = WindowTranscriber(data.whisper).first_time
    tokens = data.pieces.token_ids[-2:]
    one, two = (data.pieces.of_token(token)[0] for token in tokens)
    text = [first, tokens[0], first + 4, first + 4, tokens[1], first + 9, WindowTranscriber(data.whisper).end]
    assert labels(text, data.pieces, first) == [one, SEGMENT_END, two, SEGMENT_END]


def test_rounds_are_those_of_decoding(data: TranscriptData) -> None:
    """Tokens and rounds that are counted without decoding are those of the loop, for an untrained head."""
    torch.manual_seed(1)
    whisper, transcriber = data.whisper, WindowTranscriber(data.whisper)
    sizes = CtcHeadConfig(whisper.model.config.d_model, len(data.pieces), 1, 16, 1, 3)
    head = CtcHead(sizes)
    torch.nn.init.normal_(head.output.weight)
    tokens = drafts.ctc_token_ids(whisper)
    drafter = CtcDrafter(head, data.pieces, tokens.first_time, tokens.end)
    window = data.windows["dev"][0]
    states, prompt = transcriber.states([window.sound(NO_DISTORTION)]), transcriber.prompt("en")
    text = decode_greedily(whisper.model, states, [prompt], [True], 30)[0]
    counted = drafts.simulate_rounds(drafter, states[0], prompt, text, Plan(4, 4))
    ids = torch.tensor([prompt])
    stop = Stop(len(prompt) + 30, frozenset([tokens.end]))
    rules = generate_processors(whisper.model.generation_config, whisper.model.device, len(prompt), True)
    sequences = Sequences(ids, stop, rules)
    inputs = {"input_ids": ids, "encoder_outputs": (states,)}
    rounds = list(decode(WhisperTarget(whisper.model), inputs, sequences, MatchRule(), drafter, FixedBudget(4)))
    assert sequences.tokens[0] == text
    assert (counted.tokens, counted.rounds) == (len(text), len(rounds) - 1)
    beyond = counted.drafted - sum(round_.drafted[0] for round_ in rounds)
    assert 0 <= beyond <= 4 + 3 + 2 + 1  # the loop drafts nothing beyond the limit of tokens


def test_the_command_counts_and_writes_a_drafter(
    folder: Path, data: TranscriptData, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = data.whisper.model.config.d_model
    module = CtcModule(units=data.units, d_states=width, stride=2, d_model=16, layers=1, kernel=3)
    torch.save(
        {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 1},
        tmp_path / "head.ckpt",
    )
    given = ["--checkpoint", str(tmp_path / "head.ckpt"), "--pieces", str(folder / "pieces.json")]
    given += ["--model", str(folder / "whisper"), "--corpus", str(folder / "manifest.tsv")]
    given += ["--states", str(folder / "kept"), "--out", str(tmp_path / "ctc"), "--trained", "Trained on noise."]
    given += ["--languages", "en"]
    assert drafts.main(given) == 0
    printed = capsys.readouterr().out
    assert "trees of 8: " in printed
    head, pieces, tokens, ngram = read_ctc(tmp_path / "ctc")
    assert ngram is None
    assert head.config.d_states == width
    assert pieces.token_ids == data.pieces.token_ids
    assert tokens.end == WindowTranscriber(data.whisper).end
    assert list(tokens.languages) == data.whisper.tokenizer.convert_tokens_to_ids(["<|en|>"])
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "train.tsv").write_text("1\t1\tUn mot.\tA word.\n2\t2\tDeux mots.\tTwo words.\n")
    again = ["--head", str(tmp_path / "ctc"), "--model", str(folder / "whisper"), "--out", str(tmp_path / "known")]
    assert drafts.main([*again, "--languages", "en", "--ngram", str(tmp_path / "pairs")]) == 0
    known, _, _, ngram = read_ctc(tmp_path / "known")
    assert ngram is not None
    assert ngram.order == 3
    torch.testing.assert_close(known.state_dict(), head.state_dict())
    with pytest.raises(SystemExit):
        drafts.main(given[:2] + given[4:])
    assert "--checkpoint needs --pieces" in capsys.readouterr().err
    assert drafts.main([*given[:-1], "elvish"]) == 2
    start = str(tmp_path / "ctc")  # training may go on from the folder
    begun = CtcModule(units=data.units, d_states=width, stride=2, d_model=16, layers=1, kernel=3, start=start).head
    torch.testing.assert_close(begun.state_dict(), head.state_dict())
    lines = list[str]()  # a head of other sizes says that it begins anew
    monkeypatch.setattr("mmdec.drafters.ctc.training.module.rank_zero_info", lines.append)
    CtcModule(units=data.units, d_states=width, stride=2, d_model=24, layers=1, kernel=3, start=start)
    assert [line.partition("tensors")[2] for line in lines] == [" start untrained: `start` has other sizes"]
    assert "Trained on noise." in (tmp_path / "ctc" / "README.md").read_text()
    (tmp_path / "pieces.json").write_text("{}")
    assert drafts.main([*given, "--pieces", str(tmp_path / "pieces.json")]) == 2
