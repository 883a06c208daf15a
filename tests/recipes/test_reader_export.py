"""Tests a translator's folder made from checkpoints: it has their weights, gives the same output, and records their
origin."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mmdec
from mmdec.daspeech.checkpoint import load_encoder
from mmdec.daspeech.training.reader.module import ReaderModule
from mmdec.drafters.ctc.network import best_pieces
from mmdec.drafters.ctc.training.module import CtcModule
from mmdec.errors import InputError
from mmdec.io.audio import load_audio
from mmdec.phonetics.pieces import PieceTokenizer
from mmdec.whisper.unpadded_encoder import STATES_TAIL, read_states
from recipes.reader.export import main
from tests.support.tiny_piece_translator import parts
from tests.support.tiny_sentences import SIZES, write
from tests.support.tiny_translator import UNITS

READER = {"d_model": 16, "ffn": 16, "heads": 2, "layers": 1, "decoder_layers": 1, "graph_layers": 1, "vertices": 4.0}


def keep(module: nn.Module, folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    # What a run began from may be gone when it is exported.
    hyper: dict[str, Any] = {**dict(module.hparams), "_instantiator": "x", "start": "gone.ckpt"}  # type: ignore[arg-type]
    content = {"state_dict": module.state_dict(), "hyper_parameters": hyper, "global_step": step}
    torch.save(content, folder / f"step={step}.ckpt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each stage, two checkpoints of the reader."""
    root = write(tmp_path_factory.mktemp("runs"))
    own = parts(pronunciation=root / "pronunciation.tsv")
    own.pieces.save(root / "pieces.json")
    own.english.save(root / "english.json")
    keep(CtcModule(units=own.pieces.names, **SIZES), root / "head", 7)
    for seed, step in ((1, 10), (2, 20)):
        reader = ReaderModule(units=[own.pieces.names, own.english.names], seed=seed, **READER)
        keep(reader, root / "reader", step)
    for name, state, record in (
        ("vocoder", own.vocoder.state_dict(), {"config": asdict(own.vocoder.config)}),  # type: ignore[call-overload]
        ("tts", own.voice.tts.state_dict(), {"config": asdict(own.voice.config), "units": UNITS}),
    ):
        (root / name).mkdir()
        save_file({key: value.contiguous() for key, value in state.items()}, root / name / f"{name}.safetensors")
        (root / name / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    return root


def command(runs: Path, out: Path, **others: object) -> list[str]:
    names = {"encoder": "whisper", "head": "head", "pieces": "pieces.json", "reader": "reader"}
    names |= {"english": "english.json", "voice": "tts", "pronunciation": "pronunciation.tsv", "vocoder": "vocoder"}
    given = {name: runs / path for name, path in names.items()} | {"out": out} | others
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def test_the_folder_has_the_weights_of_its_runs(runs: Path, tmp_path: Path) -> None:
    main(command(runs, tmp_path / "everyday"))
    translator = mmdec.load(tmp_path / "everyday", "cpu")
    assert translator.decoding.strategy == "lookahead"
    training = json.loads((tmp_path / "everyday" / "provenance.json").read_text(encoding="utf-8"))["training"]
    assert training["head"]["step"] == 7
    assert (training["reader"]["step"], training["reader"]["checkpoints"]) == (20, 1)
    assert training["reader"]["hyperparameters"]["vertices"] == 4.0
    assert not {"units", "_instantiator"} & training["reader"]["hyperparameters"].keys()
    states = {name: torch.load(next((runs / name).glob(f"step={step}.ckpt")), weights_only=True)["state_dict"]
              for name, step in (("head", 7), ("reader", 20))}  # fmt: skip
    own = translator.model.state_dict()
    encoder = load_encoder(runs / "whisper")
    expected = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    expected |= states["head"] | {name.removeprefix("network."): value for name, value in states["reader"].items()}
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        assert (own[name] - value).norm() <= 0.02 * value.norm() + 1e-3, name
    sound = load_audio(runs / "clips" / "3.wav")
    with torch.no_grad():
        heard = best_pieces(*translator.model.head(*read_states(encoder, [sound], tail=STATES_TAIL)))
        source = translator.model.source(*translator.model.features([sound]))
    assert abs(int(source.lengths[0]) - int(heard.lengths[0])) <= 2  # 8 bits of the encoder


def test_checkpoints_are_averaged_and_a_strategy_is_kept(runs: Path, tmp_path: Path) -> None:
    main(command(runs, tmp_path / "model", average=2, head=runs / "head" / "step=7.ckpt", strategy="verified"))
    translator = mmdec.load(tmp_path / "model", "cpu")
    assert translator.decoding.strategy == "verified"
    first, second = (torch.load(runs / "reader" / f"step={step}.ckpt", weights_only=True) for step in (10, 20))
    name = "ar.layers.0.fc1.weight"
    mean = (first["state_dict"][f"network.{name}"] + second["state_dict"][f"network.{name}"]) / 2
    torch.testing.assert_close(translator.model.state_dict()[name], mean, atol=2e-3, rtol=1e-2)


def test_parts_of_other_pieces_are_refused(runs: Path, tmp_path: Path) -> None:
    other = PieceTokenizer.learn(["autre chose", "encore"], 30, ("<blank>",))
    other.save(tmp_path / "pieces.json")
    with pytest.raises(InputError, match="`head` must be trained on these `pieces`, but has others"):
        main(command(runs, tmp_path / "model", pieces=tmp_path / "pieces.json"))
    with pytest.raises(InputError, match="`reader` must be trained on these `pieces`, but has others"):
        main(command(runs, tmp_path / "model", english=runs / "pieces.json"))
    with pytest.raises(InputError, match="`folder` must hold checkpoints"):
        main(command(runs, tmp_path / "model", head=tmp_path))
    with pytest.raises(InputError, match="`checkpoints` must be of this kind of training"):
        main(command(runs, tmp_path / "model", head=runs / "reader"))
    assert not (tmp_path / "model").exists()


def test_parts_not_named_come_from_another_translator(runs: Path, tmp_path: Path) -> None:
    main(command(runs, tmp_path / "whole", reader=runs / "reader" / "step=10.ckpt", strategy="verified"))
    given = ["--model", str(tmp_path / "whole"), "--reader", str(runs / "reader"), "--out", str(tmp_path / "made")]
    main(given)
    main(command(runs, tmp_path / "wanted", strategy="verified"))
    for file in (tmp_path / "wanted").iterdir():
        if file.name != "provenance.json":
            assert (tmp_path / "made" / file.name).read_bytes() == file.read_bytes(), file.name
    with pytest.raises(InputError, match="`encoder` must be given, or `model`"):
        main(given[2:])


def test_layers_trained_with_the_head_replace_the_encoders(runs: Path, tmp_path: Path) -> None:
    units = PieceTokenizer.read(runs / "pieces.json").names
    module = CtcModule(units=units, **SIZES, top=1, encoder=str(runs / "whisper"))
    with torch.no_grad():
        module.top.layers[0].fc1.weight += 1.0  # type: ignore[union-attr, operator, index]
    keep(module, tmp_path / "head", 3)
    main(command(runs, tmp_path / "made", head=tmp_path / "head"))
    encoder, own = load_encoder(runs / "whisper"), load_encoder(tmp_path / "made")
    moved = own.layers[-1].fc1.weight - encoder.layers[-1].fc1.weight
    torch.testing.assert_close(moved, torch.ones_like(moved), atol=0.02, rtol=0.0)
    torch.testing.assert_close(own.conv2.weight, encoder.conv2.weight, atol=0.02, rtol=0.02)


def test_an_ngram_of_the_text_folders_is_exported_and_used(runs: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "dev", "test"):
        (text / f"{split}.tsv").write_text(f"{split}\tg{split}\tbonjour {split}\tHello {split}.\n", encoding="utf-8")
    main(command(runs, tmp_path / "everyday", ngram=text))
    first = mmdec.load(tmp_path / "everyday", "cpu").parts.model.ngram
    assert first is not None
    assert len(first.arrays["pieces_2"])
    main(["--model", str(tmp_path / "everyday"), "--head", str(runs / "head"), "--out", str(tmp_path / "again")])
    again = mmdec.load(tmp_path / "again", "cpu").parts.model.ngram
    assert again is not None
    assert {name: value.tolist() for name, value in again.arrays.items()} == {
        name: value.tolist() for name, value in first.arrays.items()
    }
