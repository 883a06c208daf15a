"""Tests the export of checkpoints: their average, safe loading, and a model folder that can be loaded."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmdec.daspeech.checkpoint import resolve
from mmdec.daspeech.training.export import assemble, load_module, save_weights
from mmdec.daspeech.training.module import DASpeechModule, load_matching_weights
from mmdec.daspeech.translate import load_translator
from mmdec.errors import InputError
from mmdec.training.checkpoints import average, newest_checkpoints, read_checkpoint
from mmdec.training.corpora.cvss import read_pairs, vocabulary
from tests.support.tiny_corpus import TinyCorpus, write_corpus
from tests.support.tiny_translator import tiny_sizes, tiny_vocoder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"), recordings=1, dev=1)


def module(units: list[str], seed: int, mu: float = 1.0) -> DASpeechModule:
    torch.manual_seed(seed)
    return DASpeechModule(units, size="small", mu=mu, model=tiny_sizes())


def checkpoint(module: DASpeechModule, step: int, folder: Path) -> Path:
    """Make a Lightning checkpoint, as far as the export reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step={step}.ckpt"
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": step}
    torch.save(content, path)
    return path


def test_the_average_is_the_mean_of_weights_and_the_last_of_counts():
    states = [{"w": torch.full((2,), float(value)), "n": torch.tensor(value)} for value in (1, 2, 6)]
    made = average(iter(states))
    assert made["w"].tolist() == [3.0, 3.0]
    assert made["w"].dtype == torch.float32
    assert made["n"].item() == 6


def test_averages_are_taken_in_double_precision():
    states = [{"w": torch.tensor([1e8]).float()}, {"w": torch.tensor([1.0])}, {"w": torch.tensor([-1e8])}]
    assert average(iter(states))["w"].item() == pytest.approx(1 / 3)


def test_the_newest_by_step_not_by_name(tmp_path: Path):
    for name in ("step=900.ckpt", "step=1000.ckpt", "step=50.ckpt", "last.ckpt"):
        (tmp_path / name).touch()
    assert [path.name for path in newest_checkpoints(tmp_path, 2)] == ["step=900.ckpt", "step=1000.ckpt"]
    assert len(newest_checkpoints(tmp_path, 9)) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="must hold checkpoints"):
        newest_checkpoints(tmp_path / "empty", 1)


def test_pickled_code_is_refused(tmp_path: Path):
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "sprung"),))

    torch.save({"state_dict": Trap()}, tmp_path / "step=1.ckpt")
    with pytest.raises(InputError, match=r"does not \(it asks for io\.open, which would run code\)"):
        read_checkpoint(tmp_path / "step=1.ckpt")
    assert not (tmp_path / "sprung").exists()


def test_a_module_comes_back_from_its_checkpoints(tmp_path: Path):
    units = ["<s>", "<pad>", "</s>", "<unk>", "a"]
    first, second = (module(units, seed) for seed in (1, 2))
    paths = [checkpoint(first, 3, tmp_path), checkpoint(second, 6, tmp_path)]
    made, step = load_module(paths)
    assert step == 6
    assert not made.training
    own, other = first.network.encoder.linear.weight, second.network.encoder.linear.weight
    torch.testing.assert_close(made.network.encoder.linear.weight, (own + other) / 2)


def test_networks_are_written_whole_and_start_another(tmp_path: Path):
    units = ["<s>", "<pad>", "</s>", "<unk>", "a"]
    source = module(units, 1, mu=0.0)
    save_weights(source.network, tmp_path / "deep" / "network.safetensors")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["network.safetensors"]
    target = module(units, 2)
    left = load_matching_weights(target.network, load_file(tmp_path / "deep" / "network.safetensors"))
    assert left
    assert all(name.startswith(("tts.", "adaptor.")) for name in left)
    for name, value in source.network.state_dict().items():
        assert torch.equal(target.network.state_dict()[name], value)


def test_a_directory_is_put_together_and_loads(corpus: TinyCorpus, tmp_path: Path):
    units = vocabulary(read_pairs(corpus.common_voice, corpus.cvss, "train")[0])
    paths = [checkpoint(module(units, seed), 10 * seed, tmp_path / "checkpoints") for seed in (1, 2)]
    vocoder = tiny_vocoder()
    folder = tmp_path / "vocoder"
    folder.mkdir()
    save_file(
        {name: value.contiguous() for name, value in vocoder.state_dict().items()}, folder / "vocoder.safetensors"
    )
    (folder / "vocoder.json").write_text(json.dumps({"config": asdict(vocoder.config)}), encoding="utf-8")
    out = assemble(paths, folder, tmp_path / "models" / "tiny")
    assert resolve(out) == out
    translator = load_translator(out, "cpu")
    assert list(translator.units) == units
    expected = load_module(paths)[0].network.state_dict()
    for name, value in translator.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-3, rtol=1e-3)
    provenance = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["training"]["step"] == 20
    assert provenance["training"]["checkpoints"] == 2


def test_the_first_stage_alone_is_not_a_model(tmp_path: Path):
    path = checkpoint(module(["<s>", "<pad>", "</s>", "<unk>", "a"], 1, mu=0.0), 5, tmp_path)
    with pytest.raises(InputError, match="must come from the joint stage"):
        assemble([path], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
