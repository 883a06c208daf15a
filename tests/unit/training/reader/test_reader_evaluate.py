"""Tests the reader's evaluation: on text, on sound through a CTC head, with references by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule

from mmdec.phonetics.pieces import HEARD, WRITTEN, Pieces, heard
from mmdec.training.ctc.module import CtcModule
from mmdec.training.reader import evaluate
from mmdec.training.reader.module import ReaderModule
from mmdec.types import told
from tests.support.tiny_sentences import SIZES, TEXTS, write

READER = {"d_model": 16, "ffn": 16, "heads": 2, "layers": 1, "decoder_layers": 1, "dropout": 0.0}


def save(module: LightningModule, path: Path) -> str:
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 0}, path)
    return str(path)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = write(tmp_path_factory.mktemp("reader"))
    pieces, english = Pieces.learn(map(heard, TEXTS), 40, HEARD), Pieces.learn(["English."] * 3, 30, WRITTEN)
    pieces.save(root / "pieces.json")
    english.save(root / "english.json")
    rows = [f"{n}\tg\t{text}\tEnglish.\tA second one.\n" for n, text in enumerate(TEXTS)]
    (root / "text" / "dev.tsv").write_text("".join(rows), encoding="utf-8")
    lines = (root / "manifest.tsv").read_text(encoding="utf-8").splitlines()
    for number in (8, 9):  # the dev recordings, named as the folder of text and its rows
        (root / "clips" / f"{number}.wav").rename(root / "clips" / f"text-{number}.wav")
        lines[number + 1] = lines[number + 1].replace(f"/{number}.wav", f"/text-{number}.wav")
    (root / "manifest.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    reader = save(ReaderModule(units=[pieces.names, english.names], **READER), root / "reader.ckpt")
    save(CtcModule(units=pieces.names, **SIZES), root / "head.ckpt")
    files = [f"--{name}={root / name}.json" for name in ("pieces", "english")]
    return [f"--checkpoint={reader}", *files, f"--text={root / 'text'}"]


def sound(command: list[str], folder: str = "") -> list[str]:
    root = Path(command[0].partition("=")[2]).parent
    corpus = f"--corpus={root / folder / 'manifest.tsv'}"
    return [*command, f"--head={root / 'head.ckpt'}", f"--encoder={root / 'whisper'}", corpus]


def test_text_and_sound_are_scored_against_all_references(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main([*command, "--limit=4"])
    printed = capsys.readouterr().out
    assert "4 sentences" in printed
    assert "English. | A second one." in printed
    evaluate.main(sound(command))
    assert "2 sentences" in capsys.readouterr().out


def test_what_cannot_be_scored_is_one_sentence(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"), told():
        evaluate.main(sound(command)[:-1])
    assert "`encoder` and `corpus` must be given" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"), told():
        evaluate.main([*sound(command), "--split=train"])  # its recordings have other names
    assert "`text` must hold the sentences of the corpus" in capsys.readouterr().err
