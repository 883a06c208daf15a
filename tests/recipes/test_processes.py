"""Tests that two processes (DDP over gloo, by Lightning's flags) train as one process does with twice the batch: the
same samples and losses in each of 20 steps. Two recipes by default, all with MMDEC_ALL=1."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdec.daspeech.training.data import SpeechTranslationData
from mmdec.daspeech.training.export import save_weights
from mmdec.daspeech.training.module import DASpeechModule
from mmdec.training.__main__ import main
from tests.recipes.small_recipes import MARKS, write_voice
from tests.recipes.tiny_squares import write_squares, write_target
from tests.support.grid import sample
from tests.support.tiny_corpus import write_corpus
from tests.support.tiny_english import write_english
from tests.support.tiny_sentences import SIZES as HEAD
from tests.support.tiny_sentences import write, write_pairs
from tests.support.tiny_translator import tiny_sizes
from tests.support.tiny_whisper import write as write_whisper

ROOT = Path(__file__).parents[2]
STEPS, EPOCH = 20, 5
Options = dict[str, Any]
pytestmark = [
    pytest.mark.slow,
    *MARKS,
    pytest.mark.usefixtures("workplace"),
    pytest.mark.filterwarnings("ignore:.*eval mode"),
    pytest.mark.filterwarnings("ignore:.*barrier"),
]


def translator(root: Path) -> tuple[Options, Options]:
    corpus = write_corpus(root / "corpus")
    data = {"common_voice": corpus.common_voice, "cvss": corpus.cvss, "jobs": 1, "batch_size": 2}
    return {"model": json.dumps(tiny_sizes())}, data


def joint(root: Path) -> tuple[Options, Options]:
    model, data = translator(root)
    return {**model, "mu": 5.0, "embedding_share": 0.0}, {**data, "acoustic": "true"}


def voice(root: Path) -> tuple[Options, Options]:
    # at the recipes' rates, float32's rounding grows beyond the bound within these steps
    return {"learning_rate": 1e-5}, {"root": write_corpus(root / "corpus").cvss, "batch_size": 2}


def vocoder(root: Path) -> tuple[Options, Options]:
    model, data = voice(root)
    return model, {**data, "acoustic": "null", "crop_frames": 16, "limit": 8}


def head(root: Path) -> tuple[Options, Options]:
    corpus = write(root / "corpus")
    data = {"corpus": corpus / "manifest.tsv", "encoder": corpus / "whisper", "text": f"[{corpus / 'text'}]"}
    stored = {"states": corpus / "states", "pieces": corpus / "pieces.json", "count": 40, "batch_states": 600}
    return {**HEAD, "warmup": 2}, {**data, **stored}


def drafts(root: Path) -> tuple[Options, Options]:
    corpus = write(root / "corpus")
    whisper = write_whisper(root / "whisper", with_heads=False, max_target_positions=24)
    data = {"corpora": f"{{{corpus / 'manifest.tsv'}: en}}", "model": whisper}
    stored = {"states": corpus / "drafts", "pieces": corpus / "tokens.json", "batch_states": 9000, "views": 4}
    return {**HEAD, "stride": 1, "warmup": 2}, {**data, **stored}


def reader(root: Path) -> tuple[Options, Options]:
    (root / "text").mkdir(parents=True)
    text = write_pairs(root / "text")
    stored = {"pieces": text / "pieces.json", "english": text / "english.json", "count": 60, "written": 80}
    sizes = {"d_model": 32, "ffn": 32, "heads": 2, "layers": 1, "decoder_layers": 1, "warmup": 2}
    shares = {"text": f"[{text / 'first'},{text / 'second'}]", "shares": "[0.5,0.5]", "imitation": "null"}
    return {**sizes, "start": "null"}, {**shares, **stored, "batch_pieces": 100}


def graph(root: Path) -> tuple[Options, Options]:
    model, data = reader(root)
    return {**model, "graph_layers": 1, "ar_weight": 0.5}, data


def whisper(root: Path) -> tuple[Options, Options]:
    shape = {"width": 16, "attention_heads": 2, "encoder_layers": 1, "encoder_ffn": 16, "decoder_layers": 2}
    model = {"shape": json.dumps({**shape, "decoder_ffn": 16}), "warmup": 1, "guided": "[[1, 0]]"}
    data = {"corpus": write_english(root / "english"), "tokenizer": root / "tokenizer", "pieces": 300}
    return model, {**data, "batch_seconds": 60}


def heads(root: Path) -> tuple[Options, Options]:
    base = write_whisper(root / "base", with_heads=False, seconds=30, max_target_positions=96)
    model = {"start": "null", "heads": 3, "max_tokens": 12, "keep_states": "false", "base_dtype": "float32"}
    data = {"base": base, "corpus": write_english(root / "english"), "batch_size": 2, "dev_batches": 1}
    return model, {**data, "train_split": "train", "dev_split": "dev", "workers": 0}


def drafter(system: str, **network: Any) -> Callable[[Path], tuple[Options, Options]]:
    def write_options(root: Path) -> tuple[Options, Options]:
        model: Options = {"network": json.dumps({"intermediate_size": 16, **network}), "warmup": 1, "noise": 0.0}
        model |= {} if system in ("flash", "dflash") else {"unroll": 2, "unroll_from": 3}
        # kept features are rounded to half precision, where the last bit depends on the padding beside a text
        model |= {"tree_nodes": 6, "chain": 3, "decoded": 0, "keep_features": "false", "half_teacher": "false"}
        model |= {"lr": 1e-5}  # at the recipes' rates, float32's rounding grows beyond the bound
        data = {"base": write_target(root / "base"), "corpus": write_squares(root / "squares"), "samples": 12}
        data |= {"dev_samples": 4, "max_tokens": 12, "base_dtype": "float32", "workers": 0, "batch_size": 2}
        return model, data

    return write_options


RECIPES: dict[str, Callable[[Path], tuple[Options, Options]]] = {
    "daspeech/phrasebook/units": translator,
    "daspeech/phrasebook/joint": joint,
    "daspeech/cvss/units": translator,
    "daspeech/cvss/joint": joint,
    "daspeech/phrasebook/acoustic": voice,
    "daspeech/cvss/acoustic": voice,
    "voice/flite": voice,
    "daspeech/phrasebook/vocoder": vocoder,
    "daspeech/cvss/vocoder": vocoder,
    "ctc/french": head,
    "ctc/drafts": drafts,
    "reader/text": reader,
    "reader/graph": graph,
    "whisper/phrasebook": whisper,
    "medusa/phrasebook": heads,
    "medusa/librispeech": heads,
    "vlm_drafters/scenes/eagle": drafter("eagle"),
    "vlm_drafters/scenes/msd": drafter("msd"),
    "vlm_drafters/scenes/specvlm": drafter("specvlm", grid=[2, 2], pool_ratio=2, prune_ratio=2),
    "vlm_drafters/scenes/vispec": drafter("vispec"),
    "vlm_drafters/scenes/flash": drafter("flash", slots=3, latents=2),
    "vlm_drafters/scenes/eagle3": drafter("eagle3", draft_vocab_size=40),
    "vlm_drafters/scenes/dflash": drafter("dflash", num_hidden_layers=2, block_size=4),
    "vlm_drafters/scenes/heads": drafter("heads", kind="hydra", heads=3),
}
QUICK = ("daspeech/phrasebook/units", "ctc/french")
SIZE = {"batch_size", "batch_states", "batch_pieces", "batch_seconds"}  # of a process's batch


def arguments(recipe: str, model: Options, data: Options, processes: int) -> list[str]:
    """Return the recipe, on this many processes; one process has a batch of twice the size."""
    whole = {name: value * 2 if processes == 1 and name in SIZE else value for name, value in data.items()}
    trainer = {"accelerator": "cpu", "precision": "32-true", "devices": processes, "log_every_n_steps": 1}
    trainer |= {"strategy": "auto" if processes == 1 else "ddp_fork_find_unused_parameters_true"}
    trainer |= {"max_epochs": STEPS // EPOCH, "max_steps": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    trainer |= {"accumulate_grad_batches": 1}
    return [
        "fit",
        *(f"--config={ROOT / 'recipes' / name}.yaml" for name in ("base", recipe)),
        *(f"--trainer.{name}={value}" for name, value in trainer.items()),
        *(f"--model.init_args.{name}={value}" for name, value in model.items()),
        *(f"--data.init_args.{name}={value}" for name, value in {**whole, "steps_per_epoch": EPOCH}.items()),
        "--trainer.callbacks+=tests.recipes.deterministic_training.Still",
    ]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step."""
    (log,) = folder.glob("runs/**/metrics.csv")
    with log.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    named = "train/loss" if "train/loss" in rows[0] else "train/ctc"
    return {int(row["step"]): float(row[named]) for row in rows if row[named]}


@pytest.mark.parametrize("recipe", sample(RECIPES, QUICK))
def test_two_processes_give_the_losses_of_one_with_twice_the_batch(
    recipe: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = RECIPES[recipe](workplace / "given")
    one, two = workplace / "one", workplace / "two"
    for folder in (one, two):
        folder.mkdir()
        prepare(recipe, folder, data)
    monkeypatch.chdir(one)
    main(arguments(recipe, model, data, 1))
    monkeypatch.chdir(two)
    main(arguments(recipe, model, data, 2))
    expected, result = losses(one), losses(two)
    assert sorted(expected) == sorted(result) == list(range(STEPS))
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert expected[STEPS - 1] != expected[0]  # something was learned


def prepare(recipe: str, folder: Path, data: Options) -> None:
    """Put the files of earlier stages where the recipe looks for them."""
    (folder / "models").symlink_to(ROOT / "models")
    if not recipe.endswith("joint"):
        return
    torch.manual_seed(0)
    name = "cvss-{}" if "cvss" in recipe else "{}"
    units = SpeechTranslationData(str(data["common_voice"]), str(data["cvss"])).units
    write_voice(folder / "runs" / name.format("acoustic"), units)
    network = DASpeechModule(units, size="small", model=tiny_sizes()).network
    save_weights(network, folder / "runs" / name.format("units") / "network.safetensors")
