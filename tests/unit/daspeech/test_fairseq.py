"""Tests published DASpeech checkpoints: names, shapes, outputs against a simple reference, folders, refusals."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdec.daspeech.fairseq import MELS, convert_fairseq, read_dictionary, read_fairseq_checkpoint, read_published
from mmdec.daspeech.model import DASpeech, DASpeechConfig
from mmdec.daspeech.translate import load_translator
from mmdec.errors import InputError
from mmdec.io import audio
from mmdec.kernels.dag_decode import decode_lattice
from tests.support.published_daspeech import PAPER, PHONES, SMALL, Naive, arguments, random_weights, shapes, write

UNITS = 4 + len(PHONES)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def converted(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_fairseq(published, tmp_path_factory.mktemp("converted") / "model")


def small_network() -> tuple[DASpeech, Naive]:
    weights = random_weights(SMALL, UNITS)
    result = read_published(arguments(SMALL), weights)
    model = DASpeech(result.config, UNITS)
    missing = model.load_state_dict(result.state, strict=False).missing_keys
    assert sorted(missing) == ["tts.mel_mean", "tts.mel_std"]  # of the statistics, which are no weights
    return model.eval(), Naive(weights, SMALL)


def test_published_sizes_equal_the_paper():
    weights = {name: torch.zeros(shape) for name, shape in shapes(PAPER, 79).items()}
    result = read_published(arguments(PAPER), weights)
    paper = DASpeechConfig()
    assert result.config == replace(paper, ar=None, tts=replace(paper.tts, positions="fairseq"))
    with torch.device("meta"):
        own = DASpeech(result.config, 79).state_dict()
    named = result.state | {"tts.mel_mean": torch.zeros(80), "tts.mel_std": torch.zeros(80)}
    assert {name: value.shape for name, value in own.items()} == {name: value.shape for name, value in named.items()}
    parameters = sum(p.numel() for p in DASpeech(result.config, 79).parameters())
    assert 93.3e6 < parameters < 93.5e6


@pytest.mark.parametrize("frames", [37, 120])
@torch.no_grad()
def test_the_forward_equals_the_paper(frames: int):
    model, naive = small_network()
    features = torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(frames))
    lengths = torch.tensor([frames])
    states, sizes = model.encode(features, lengths)
    expected = naive.encode(features[0])
    torch.testing.assert_close(states[0].double(), expected, rtol=0, atol=1e-5)
    lattice = model.lattice(states, sizes, lengths)
    hidden, emissions, links = naive.graph(expected, frames)
    torch.testing.assert_close(lattice.hidden[0].double(), hidden, rtol=0, atol=1e-5)
    torch.testing.assert_close(lattice.emissions[0].double(), emissions, rtol=0, atol=3e-5)
    torch.testing.assert_close(lattice.links[0].double(), links, rtol=0, atol=3e-5)
    vertices = torch.arange(1, len(hidden))
    output = model.tts(model.acoustic_input(hidden[None, vertices].float()), torch.tensor([len(vertices)]))
    mel = naive.speak(hidden[vertices])
    assert len(mel) == output.mel_lengths > 10
    torch.testing.assert_close(output.mel[0].double(), mel, rtol=0, atol=1e-5)


def test_a_converted_folder_equals_the_checkpoint(published: Path, converted: Path):
    samples = audio.load_audio("data/samples/" + sorted(p.name for p in Path("data/samples").glob("*.wav"))[0])
    translator = load_translator(converted)
    (translation,) = translator.translate([samples])
    naive = Naive(read_fairseq_checkpoint(published / "average.pt")[1], SMALL)
    features = audio.fbank(samples)
    hidden, emissions, links = naive.graph(naive.encode(features), len(features))
    path = decode_lattice(emissions[None], links[None], torch.tensor([len(links)]), "lookahead", collapse=True)
    tokens: list[int] = path.tokens[0].tolist()
    steps = [at for at, token in enumerate(tokens) if token >= 4]
    assert [PHONES[tokens[at] - 4] for at in steps] == translation.units
    assert translation.text == " ".join(translation.units)
    mel = naive.speak(hidden[path.vertices[0, [*steps, -1]]])
    assert abs(len(translation.samples) - MELS.samples(len(mel))) <= MELS.samples(1)  # weights are in half precision
    assert translation.samples.abs().max() > 1e-4
    stats = np.load(published / "gcmvn_stats.npz")
    assert isinstance(translator.model, DASpeech)
    assert np.allclose(translator.model.tts.mel_std.numpy(), stats["std"], atol=2e-3)


def test_a_converted_folder_is_saved_and_refuses_what_it_lacks(converted: Path, tmp_path: Path):
    translator = load_translator(converted)
    again = load_translator(translator.save_pretrained(tmp_path / "again"))
    sound = torch.randn(16_000, generator=torch.Generator().manual_seed(1)) * 0.1
    assert torch.equal(translator.translate([sound])[0].samples, again.translate([sound])[0].samples)
    for strategy in ("autoregressive", "verified"):
        with pytest.raises(InputError, match="has no autoregressive decoder"):
            translator.translate([sound], strategy)
    with pytest.raises(InputError, match="must be left out"):
        load_translator(converted, vocoder="someone/hifigan")


class _Other:
    """A class that no checkpoint may name."""


def test_pickles_of_other_classes_are_refused(tmp_path: Path):
    torch.save({"args": _Other(), "model": {}}, tmp_path / "bad.pt")
    with pytest.raises(InputError, match="asks for more"):
        read_fairseq_checkpoint(tmp_path / "bad.pt")
    torch.save({"args": Namespace(a=1), "model": {"w": torch.tensor([float("nan")])}}, tmp_path / "nan.pt")
    with pytest.raises(InputError, match="finite"):
        read_fairseq_checkpoint(tmp_path / "nan.pt")


@pytest.mark.parametrize("name", ["config.yaml", "vocab.txt", "gcmvn_stats.npz", "g_02500000", "config.json"])
def test_a_file_that_is_missing_is_named(published: Path, tmp_path: Path, name: str):
    shutil.copytree(published, tmp_path / "in")
    (tmp_path / "in" / name).unlink()
    with pytest.raises(InputError, match=r"must (hold|be a generator)"):
        convert_fairseq(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"activation_fn": "relu"}, "activation_fn"),
        ({"decoder_learned_pos": False}, "decoder_learned_pos"),
        ({"links_feature": "feature"}, "links_feature"),
        ({"max_transition_length": 20}, "max_transition_length"),
        ({"src_upsample_scale": None}, "src_upsample_scale"),
    ],
)
def test_settings_of_other_networks_are_refused(changed: dict[str, object], match: str):
    with pytest.raises(InputError, match=match):
        read_published(arguments(SMALL) | changed, random_weights(SMALL, UNITS))


def test_unused_weights_are_refused():
    weights: dict[str, Tensor] = random_weights(SMALL, UNITS)
    with pytest.raises(InputError, match="postnet"):
        read_published(arguments(SMALL), weights | {"tts.postnet.weight": torch.zeros(1)})
    weights["decoder.output_projection.weight"] = weights["decoder.output_projection.weight"] + 1
    with pytest.raises(InputError, match="share"):
        read_published(arguments(SMALL), weights)


def test_a_dictionary_is_read_in_its_order(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("AH0 12\nspn 3 #fairseq:overwrite\n")
    assert read_dictionary(tmp_path / "vocab.txt") == ["<s>", "<pad>", "</s>", "<unk>", "AH0", "spn"]
    for text in ("AH0\n", "AH0 1\nAH0 2\n", "AH0 x\n"):
        (tmp_path / "vocab.txt").write_text(text)
        with pytest.raises(InputError):
            read_dictionary(tmp_path / "vocab.txt")
