"""Tests the folder of a translator with a Whisper's encoder: weights in 8 bits, saving again gives the same bytes, and
each damage gives one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmdec
from mmdec.daspeech.checkpoint import read_parts, resolve, save_parts
from mmdec.daspeech.piece_checkpoint import POSITIONS, REQUIRED_FILES, PieceTranslatorParts, save_piece_translator
from mmdec.errors import InputError, MmdecError
from mmdec.nn.int8 import SCALE_SUFFIX
from tests.conftest import RATE, buzz
from tests.support.tiny_piece_translator import parts

CPU = torch.device("cpu")


def loaded(folder: Path) -> PieceTranslatorParts:
    result = read_parts(folder, CPU)
    assert isinstance(result, PieceTranslatorParts)
    return result


@pytest.fixture
def copied(tiny_heard_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_heard_model, tmp_path / "copy"))


def test_saving_a_loaded_checkpoint_gives_the_same_bytes(tiny_heard_model: Path, tmp_path: Path) -> None:
    assert {path.name for path in tiny_heard_model.iterdir()} == {*REQUIRED_FILES, "provenance.json"}
    (tiny_heard_model / "provenance.json").read_text(encoding="utf-8")
    model = mmdec.load(tiny_heard_model, "cpu")
    again = model.save_pretrained(tmp_path / "again")
    for name in (*REQUIRED_FILES, "provenance.json"):
        assert (again / name).read_bytes() == (tiny_heard_model / name).read_bytes(), name
    options = {"sample_rate": RATE, "device": "cpu"}
    one, other = (mmdec.translate_speech(buzz(1.5), model=folder, **options) for folder in (tiny_heard_model, again))
    assert one.units
    assert (one.text, one.units, one.audio.tolist()) == (other.text, other.units, other.audio.tolist())


def test_int8_matrices_stay_near_the_original(tiny_heard_model: Path, tmp_path: Path) -> None:
    files = [load_file(tiny_heard_model / name) for name in ("encoder.safetensors", "model.safetensors")]
    stored = files[0] | files[1]
    own = parts(pronunciation=tmp_path / "p.tsv").model.state_dict()
    read = loaded(tiny_heard_model).model.state_dict()
    assert POSITIONS not in stored
    assert {name for name in stored if not name.endswith(SCALE_SUFFIX)} == own.keys() - {POSITIONS}
    assert read.keys() == own.keys()
    packed = 0
    for name, value in own.items():
        error = (read[name] - value).norm() / value.norm().clamp(min=1e-6)
        assert error < (0.02 if name + SCALE_SUFFIX in stored else 1e-3), name
        packed += stored[name].dtype == torch.int8 if name in stored else 0
    assert packed >= 2


def test_a_card_belongs_to_its_weights(tiny_heard_model: Path, tmp_path: Path) -> None:
    own = loaded(tiny_heard_model)
    target = save_piece_translator(tmp_path / "model", own, provenance={"training": {"step": 3}})
    (target / "README.md").write_text("# card\n")
    assert json.loads((target / "provenance.json").read_text())["training"] == {"step": 3}
    save_piece_translator(target, own)
    assert (target / "README.md").read_text() == "# card\n"
    saved = save_parts(tmp_path / "other", loaded(target))
    assert (saved / "README.md").read_text() == "# card\n"
    with torch.no_grad():
        own.model.autoregressive.embed_tokens.weight[5] += 1
    with pytest.raises(InputError, match="no card of other weights"):
        save_piece_translator(target, own)


def test_weights_beyond_half_precision_are_not_saved(tmp_path: Path) -> None:
    own = parts(pronunciation=tmp_path / "p.tsv")
    with torch.no_grad():
        own.model.head.norm.weight[0] = 1e6
    with pytest.raises(MmdecError, match=r"must fit half precision, but head\.norm\.weight"):
        save_piece_translator(tmp_path / "model", own)
    assert not (tmp_path / "model").exists()
    with pytest.raises(InputError, match="`vocoder` must be the model's own to be saved, but is a Linear"):
        save_parts(tmp_path / "model", replace(own, vocoder=torch.nn.Linear(1, 1)))


def test_the_config_says_how_it_decodes(copied: Path) -> None:
    assert loaded(copied).decoding.strategy == "lookahead"
    change(copied, lambda config: config["decoding"].update(strategy="verified"))
    own = mmdec.load(copied, "cpu")
    sound = {"sample_rate": RATE, "model": own}
    assert mmdec.translate_speech(buzz(1.0), **sound).units == (
        mmdec.translate_speech(buzz(1.0), strategy="autoregressive", **sound).units
    )
    assert mmdec.translate_speech(buzz(1.0), strategy="lookahead", **sound).passes == 1


def test_a_model_without_a_graph_decodes_autoregressively(tmp_path: Path) -> None:
    folder = save_piece_translator(tmp_path / "plain", parts(graph=False, pronunciation=tmp_path / "p.tsv"))
    sound = {"sample_rate": RATE, "model": folder, "device": "cpu"}
    out = mmdec.translate_speech(buzz(1.0), **sound)
    assert out.passes >= len(out.units) > 1
    for options in ({"strategy": "lookahead"}, {"strategy": "verified"}):
        with pytest.raises(InputError, match="`strategy` must be autoregressive for 'plain', which has no graph"):
            mmdec.translate_speech(buzz(1.0), **options, **sound)
    change(folder, lambda config: config["decoding"].update(strategy="lookahead"))
    with pytest.raises(InputError, match="`model` must decode by one of autoregressive, but its config says"):
        mmdec.load(folder, "cpu")


def change(folder: Path, edit: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40])


def tensors(name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        state = load_file(folder / name)
        edit(state)
        save_file(state, folder / name)

    return run


def settings(edit: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder, edit)


def leads_out(folder: Path) -> None:
    (folder / "english.json").rename(folder.parent / "english.json")
    (folder / "english.json").symlink_to(folder.parent / "english.json")


def swapped(folder: Path) -> None:
    shutil.copy(folder / "pieces.json", folder / "english.json")


WEIGHT = "ar.embed_tokens.weight"
PACKED = "reader.embed_pieces.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "voice.safetensors").unlink(), "`model` must hold .* lacks voice.safetensors"),
        (lambda folder: (folder / "pronunciation.tsv").unlink(), "`model` must hold .* lacks pronunciation.tsv"),
        (cut("encoder.safetensors"), "`model` must hold whole safetensors, but .*encoder.safetensors' is damaged"),
        (cut("model.safetensors"), "`model` must hold whole safetensors"),
        (cut("voice.safetensors"), "`model` must hold whole safetensors"),
        (cut("vocoder.safetensors"), "`model` must hold whole safetensors"),
        (cut("phones.json"), "`model` must hold phones.json as a JSON list"),
        (cut("english.json"), "`pieces` must be a tokenizer's file, but .*english.json"),
        (cut("config.json"), "`model` must hold config.json as a JSON object"),
        (lambda folder: (folder / "phones.json").write_text("[1]"), "phones.json as a list of names"),
        (lambda folder: (folder / "phones.json").write_text('["a"]'), "'tts.units.weight' in .* is .* and not"),
        (lambda folder: (folder / "pronunciation.tsv").write_text("hello\thh zz\n"), "phones of its voice.*'zz'"),
        (lambda folder: (folder / "pronunciation.tsv").write_bytes(b"\xff\xfe"), "pronunciation.tsv"),
        (leads_out, "must hold its tables in its own folder, but .*english.json' lies outside"),
        (swapped, "must have <s>, <pad>, </s>, <unk> first in english.json"),
        (settings(lambda c: c.update(layout="letters")), "damaged or of another version .*its layout is 'letters'"),
        (settings(lambda c: c.pop("voice")), "damaged or of another version .*voice"),
        (settings(lambda c: c["architecture"].pop("head")), "damaged or of another version .*head"),
        (settings(lambda c: c["architecture"]["encoder"].update(layers=10**9)), "weights for all of its layers"),
        (
            settings(lambda c: c["architecture"]["encoder"].update(positions=10**12)),
            "have at most 1500 encoder positions",
        ),
        (settings(lambda c: c["architecture"]["encoder"].update(ffn=64)), "weights of its config's shapes"),
        (settings(lambda c: c["architecture"]["reader"].update(heads=3)), "must divide its channels into heads"),
        (settings(lambda c: c["architecture"]["reader"].update(pieces=7)), "`pieces` must fit"),
        (settings(lambda c: c["architecture"].update(best=10**6)), "`best` must fit"),
        (settings(lambda c: c["decoding"].update(strategy="fast")), "must decode by one of lookahead.*'fast'"),
        (settings(lambda c: c["decoding"].update(speed=1)), "damaged or of another version"),
        (tensors("model.safetensors", lambda s: s.pop(WEIGHT)), f"must hold all weights, but .* lacks '{WEIGHT}'"),
        (
            tensors("model.safetensors", lambda s: s.update(more=s[WEIGHT].clone())),
            "holds 'more', 1 unknown tensors in all",
        ),
        (tensors("encoder.safetensors", lambda s: s["encoder.layer_norm.bias"].fill_(torch.nan)), "finite weights"),
    ],
)
def test_each_damage_is_one_clear_error(copied: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copied)
    with pytest.raises(InputError, match=message) as caught:
        mmdec.load(copied, "cpu")
    assert "\n" not in str(caught.value)


def test_scales_that_do_not_fit_are_refused(copied: Path) -> None:
    state = load_file(copied / "encoder.safetensors")
    name = next(name for name in state if name.endswith(SCALE_SUFFIX))
    for value, message in ((state[name][:-1], "must hold int8 rows and a scale for each"),
                        (torch.full_like(state[name], 3e38), "must hold finite weights"),
                        (torch.full_like(state[name], torch.nan), "must hold finite weights")):  # fmt: skip
        save_file(state | {name: value.clone()}, copied / "encoder.safetensors")
        with pytest.raises(InputError, match=message):
            mmdec.load(copied, "cpu")


def test_public_calls_load_it(tiny_heard_model: Path) -> None:
    assert resolve(tiny_heard_model) == tiny_heard_model
