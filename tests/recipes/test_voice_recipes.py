"""Tests the recipes of voice and vocoder on a tiny corpus: runs that are killed and resumed give the same weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from safetensors.torch import load_file
from torch import Tensor

from mmdec.daspeech.acoustic import FastSpeech2Config
from mmdec.daspeech.piece_translator import PhoneVoice
from mmdec.daspeech.training.acoustic import AcousticData, AcousticModule, EnglishSpeech, epoch_batches
from mmdec.daspeech.training.vocoder import VocoderData, load_acoustic
from mmdec.daspeech.vocoder import Vocoder, VocoderConfig
from mmdec.errors import InputError
from mmdec.io.audio import load_audio, save_audio
from mmdec.nn.int8 import unpack_rows
from mmdec.training.__main__ import TrainingCLI
from tests.support.lightning_warnings import LIGHTNING

EVERYDAY = Path(__file__).parents[2] / "models" / "daspeech-everyday"
RECIPES = Path(__file__).parents[2] / "recipes" / "daspeech"
pytestmark = [
    pytest.mark.slow,
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


def speech(phones: list[tuple[str, float]], generator: torch.Generator) -> Tensor:
    """Something with a pitch: harmonics of 180 Hz, another timbre for each phone, silence for pau."""
    pieces, start = [], 0.0
    for phone, end in phones:
        time = torch.arange(round(start * 16000), round(end * 16000)) / 16000
        tone = sum(torch.sin(2 * torch.pi * 180 * k * time) / (1 + abs(k - ord(phone[0]) % 7)) for k in range(1, 8))
        pieces.append(
            0.0 * time if phone == "pau" else 0.05 * tone + 0.005 * torch.randn(len(time), generator=generator)
        )
        start = end
    return torch.cat(pieces)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus") / "cvss_c"
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 6), ("dev", 2)):
        table, alignments = [], []
        for number in range(count):
            letters = [*"abcd"[: 2 + number % 3], "pau", *"eb"[: 1 + number // 3]]
            phones = [("pau", 0.1), *[(phone, 0.1 + 0.15 * (i + 1)) for i, phone in enumerate(letters)], ("pau", 1.4)]
            name = f"common_voice_fr_{number + 100 * (split == 'dev'):08d}.mp3"
            save_audio(root / split / f"{name}.wav", speech(phones, generator))
            table.append(f"{name}\t{' '.join(letters)}.")
            alignments.append(f"{name}\t{' '.join(f'{phone}:{end:.3f}' for phone, end in phones)}")
        (root / f"{split}.tsv").write_text("\n".join(table) + "\n", encoding="utf-8")
        (root / f"{split}.alignment.tsv").write_text("\n".join(alignments) + "\n", encoding="utf-8")
    return root


def fit(recipe: str, corpus: Path, out: Path, *more: str) -> None:
    """Return the recipe with its own settings, but small: on the CPU, two steps an epoch, files under `out`."""
    TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=[
            "fit",
            f"--config={RECIPES.parent / 'base.yaml'}",
            f"--config={RECIPES / recipe}",
            "--trainer.accelerator=cpu",
            "--trainer.devices=1",
            "--trainer.strategy=auto",
            f"--trainer.default_root_dir={out}",
            f"--data.init_args.root={corpus}",
            "--data.init_args.batch_size=2",
            "--data.init_args.steps_per_epoch=2",
            *more,
        ],
    )


def same(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_acoustic_recipe_resumes_to_the_same_weights(corpus: Path, tmp_path: Path):
    recipe, keep = "phrasebook/acoustic.yaml", "--trainer.callbacks.save_top_k=-1"
    fit(recipe, corpus, tmp_path / "whole", "--trainer.max_steps=4", keep)
    middle = tmp_path / "whole" / "checkpoints" / "step=2.ckpt"
    fit(recipe, corpus, tmp_path / "parts", "--trainer.max_steps=4", f"--ckpt_path={middle}")
    assert same(tmp_path / "whole" / "tts.safetensors", tmp_path / "parts" / "tts.safetensors")
    described = json.loads((tmp_path / "whole" / "tts.json").read_text(encoding="utf-8"))
    assert described["units"] == ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "d", "e", "pau"]


def test_the_voice_recipe_starts_from_the_shipped_voice(corpus: Path, tmp_path: Path):
    fit("../voice/flite.yaml", corpus, tmp_path, "--trainer.max_steps=1", "--data.init_args.steps_per_epoch=1")
    described = json.loads((tmp_path / "tts.json").read_text(encoding="utf-8"))
    voice = PhoneVoice(FastSpeech2Config.from_values(described["config"]), len(described["units"]))
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
    voice.load_state_dict(checkpoint["state_dict"])
    learnt, exported = voice.tts.state_dict(), load_file(tmp_path / "tts.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in learnt.items())
    shipped = unpack_rows(load_file(EVERYDAY / "voice.safetensors"))["tts.decoder.0.conv1.weight"]
    torch.testing.assert_close(learnt["decoder.0.conv1.weight"], shipped, rtol=0, atol=2e-3)
    with torch.inference_mode():
        mel, frames = voice.eval()(torch.tensor([[4, 5, 9, 6]]), torch.tensor([4]))
    assert mel.shape[1] == int(frames) > 4


def test_the_vocoder_recipe_resumes_to_the_same_weights_with_an_adversary(corpus: Path, tmp_path: Path):
    fit("phrasebook/acoustic.yaml", corpus, tmp_path / "acoustic", "--trainer.max_steps=2")
    recipe = "phrasebook/vocoder.yaml"
    small = (
        "--data.init_args.crop_frames=16",
        "--model.init_args.adversarial_from=1",
        f"--data.init_args.acoustic={tmp_path / 'acoustic'}",
        "--trainer.callbacks.save_top_k=-1",
    )
    fit(recipe, corpus, tmp_path / "whole", *small, "--trainer.max_epochs=2")
    middle = tmp_path / "whole" / "checkpoints" / "step=2.ckpt"
    fit(recipe, corpus, tmp_path / "parts", *small, "--trainer.max_epochs=2", f"--ckpt_path={middle}")
    assert same(tmp_path / "whole" / "vocoder.safetensors", tmp_path / "parts" / "vocoder.safetensors")
    described = json.loads((tmp_path / "whole" / "vocoder.json").read_text(encoding="utf-8"))
    Vocoder(VocoderConfig(**described["config"])).load_state_dict(load_file(tmp_path / "whole" / "vocoder.safetensors"))


@pytest.mark.parametrize("name", ["acoustic", "vocoder"])
def test_the_recipes_for_cvss_run(name: str, corpus: Path, tmp_path: Path):
    end = "--trainer.max_steps=1" if name == "acoustic" else "--trainer.max_epochs=1"
    more = ("--data.init_args.crop_frames=16", "--data.init_args.acoustic=null") if name == "vocoder" else ()
    fit(f"cvss/{name}.yaml", corpus, tmp_path, end, "--trainer.limit_train_batches=1", *more)
    assert list(tmp_path.glob("*.safetensors"))


def test_the_voice_can_be_learnt(corpus: Path, tmp_path: Path):
    fit(
        "phrasebook/acoustic.yaml",
        corpus,
        tmp_path,
        "--trainer.max_steps=80",
        "--data.init_args.steps_per_epoch=40",
        "--trainer.precision=32-true",
    )
    tts, units = load_acoustic(tmp_path)
    held = EnglishSpeech(corpus, "dev")
    ids, targets = held.batch([0, 1], units)
    with torch.inference_mode():
        output = tts(tts.embed(ids), targets.lengths)
    total = targets.durations.sum(1).float()
    assert ((output.mel_lengths - total).abs() / total).max() < 0.35


def test_rows_that_cannot_be_used_are_counted_and_named(corpus: Path, tmp_path: Path):
    root = tmp_path / "cvss_c"
    root.mkdir()
    (root / "train").symlink_to(corpus / "train")
    names = [f"common_voice_fr_{number:08d}.mp3" for number in (0, 1, 2, 3, 77)]
    lines = {
        line.split("\t")[0]: line.split("\t")[1] for line in (corpus / "train.alignment.tsv").read_text().splitlines()
    }
    aligned = {names[0]: lines[names[0]], names[1]: "a:9.0", names[2]: "a:x", names[4]: "a:0.5"}
    (root / "train.tsv").write_text(
        "".join(f"{name}\tsentence {i}\n" for i, name in enumerate(names)), encoding="utf-8"
    )
    (root / "train.alignment.tsv").write_text("".join(f"{n}\t{a}\n" for n, a in aligned.items()), encoding="utf-8")
    for _ in range(2):  # the second time from the cache
        read = EnglishSpeech(root, "train")
        assert [row[0] for row in read.rows] == [names[0]]
        assert read.bad.count == 4
        assert names[3] in read.bad.names["no alignment"]
        assert names[4] in read.bad.names["target recording missing or empty"]
        assert any(names[1] in bad for reason, bad in read.bad.names.items() if "must last as long" in reason)
    with pytest.raises(InputError, match=r"test\.tsv"):
        EnglishSpeech(root, "test")


def test_two_processes_may_build_the_cache_at_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "cvss_c"
    shutil.copytree(corpus, root)
    replace = os.replace

    def late(part: Path, folder: Path) -> None:
        shutil.copytree(part, folder)  # the other one's
        replace(part, folder)

    monkeypatch.setattr(os, "replace", late)
    assert len(EnglishSpeech(root, "train")) == 6
    (left,) = (tmp_path / "cache").iterdir()
    assert (left / "index.json").is_file()


def test_an_interrupted_cache_is_not_used(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "cvss_c"
    shutil.copytree(corpus, root)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("numpy.save", fail)
        with pytest.raises(OSError, match="full"):
            EnglishSpeech(root, "train")
    assert not list((tmp_path / "cache").iterdir())
    assert not EnglishSpeech.ready(root, "train")
    assert len(EnglishSpeech(root, "train")) == 6


def test_other_recordings_have_their_own_cache(corpus: Path, tmp_path: Path):
    """Two corpora with the same texts beside each other, and one whose recordings were made again."""
    root, other = tmp_path / "cvss_c", tmp_path / "another_voice"
    shutil.copytree(corpus, root)
    shutil.copytree(corpus, other)
    for path in (other / "train").glob("*.wav"):
        save_audio(path, 0.5 * load_audio(path))
    first = EnglishSpeech(root, "train")
    assert not EnglishSpeech.ready(other, "train")
    second = EnglishSpeech(other, "train")
    assert [first.rows, first.units] == [second.rows, second.units]
    assert not torch.equal(first.mel(0), second.mel(0))
    path = next((root / "train").glob("*.wav"))
    save_audio(path, torch.cat([load_audio(path), torch.zeros(160)]))
    assert not EnglishSpeech.ready(root, "train")


def test_the_first_process_makes_all_caches(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "cvss_c"
    shutil.copytree(corpus, root)
    for data in (AcousticData(str(root)), VocoderData(str(root))):
        data.prepare_data()
        with monkeypatch.context() as patch:
            patch.setattr(EnglishSpeech, "_build", lambda *_: pytest.fail("built by a rank"))
            data.setup("fit")


def test_ranks_drop_out_differently_and_steps_alike(monkeypatch: pytest.MonkeyPatch):
    module = AcousticModule(["<s>", "<pad>", "</s>", "<unk>", "a"], config="small", seed=3)

    def drawn_batch(step: int, rank: int) -> Tensor:
        monkeypatch.setattr(AcousticModule, "global_step", step)
        monkeypatch.setattr(AcousticModule, "global_rank", rank)
        module.on_train_batch_start(None, 0)  # type: ignore[arg-type]
        return torch.rand(4)

    assert torch.equal(drawn_batch(5, 1), drawn_batch(5, 1))
    assert not torch.equal(drawn_batch(5, 0), drawn_batch(5, 1))
    assert not torch.equal(drawn_batch(5, 1), drawn_batch(6, 1))


def test_recordings_with_one_rendering_are_read_once(corpus: Path, tmp_path: Path):
    root = tmp_path / "cvss_c"
    root.mkdir()
    (root / "train").symlink_to(corpus / "train")
    for suffix in ("tsv", "alignment.tsv"):
        text = (corpus / f"train.{suffix}").read_text(encoding="utf-8")
        (root / f"train.{suffix}").write_text(text + text, encoding="utf-8")
    assert len(EnglishSpeech(root, "train")) == 6
    assert len(EnglishSpeech(root, "train", limit=4)) == 4


def test_batches_follow_from_seed_and_epoch():
    lengths = [5, 9, 2, 7, 4]
    assert epoch_batches(lengths, 3, 4, 1, 2) == epoch_batches(lengths, 3, 4, 1, 2)
    assert epoch_batches(lengths, 3, 4, 1, 2) != epoch_batches(lengths, 3, 4, 1, 3)
    assert sum(len(batch) for batch in epoch_batches(lengths, 3, 4, 1, 2)) == 12


@pytest.fixture(autouse=True)
def quiet_seed(monkeypatch: pytest.MonkeyPatch):
    """LightningCLI reads the command line, seeds every generator and says so in the environment: leave no trace."""
    monkeypatch.setattr("sys.argv", ["train"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    seed_everything(0, verbose=False)
