"""Tests the recipe of a drafter for an audio language model, on a tiny target and corpus; the drafter changes no
transcript."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmdec
from mmdec.drafters.networks.training.audio_data import AudioData
from mmdec.drafters.networks.training.samples import append, join
from mmdec.errors import InputError
from mmdec.io.audio.files import save_audio
from mmdec.pretrained.audio_lm import load_audio_lm
from mmdec.training.__main__ import main
from tests.support.audio_lm_folders import RATE, write
from tests.support.lightning_warnings import FITTING

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "vlm_drafters" / "librispeech" / "eagle3-qwen2-audio.yaml"
pytestmark = [
    pytest.mark.slow,
    *FITTING,
    pytest.mark.usefixtures("workplace"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noises of several lengths, with transcripts."""
    root, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    for split, speaker, count in (("train-clean-100", "19", 6), ("dev-clean", "84", 3)):
        chapter = root / split / speaker / "198"
        chapter.mkdir(parents=True)
        lines = []
        for number in range(count):
            name = f"{speaker}-198-{number:04d}"
            noise = (0.15 * rng.standard_normal(int(rng.integers(9000, 31000)))).astype(np.float32)
            save_audio(chapter / f"{name}.flac", noise, RATE)
            lines.append(f"{name} TEXT {number} OF {speaker}\n")
        (chapter / f"{speaker}-198.trans.txt").write_text("".join(lines))
    return root


@pytest.mark.parametrize(("family", "system"), [("Qwen2Audio", "eagle3"), ("GraniteSpeech", "eagle")])
def test_an_audio_drafter_trains_and_changes_no_text(
    family: str, system: str, corpus: Path, workplace: Path, tmp_path: Path
) -> None:
    base = write(family, tmp_path / "base")
    network: dict[str, Any] = {"intermediate_size": 16}
    if system == "eagle3":
        network["draft_vocab_size"] = 40
        kind = ["--model.init_args.unroll=2"]
    else:
        kind = ["--model=mmdec.drafters.eagle.training.modules.EagleModule"]
    given = {"network": json.dumps(network), "warmup": "1", "chain": "3", "tree_nodes": "6", "decoded": "2"}
    main(
        [
            "fit",
            f"--config={ROOT / 'recipes' / 'base.yaml'}",
            f"--config={RECIPE}",
            *kind,
            "--trainer.accelerator=cpu",
            "--trainer.devices=1",
            "--trainer.strategy=auto",
            "--trainer.precision=32-true",
            "--trainer.max_epochs=2",
            *(f"--model.init_args.{name}={value}" for name, value in given.items()),
            f"--data.init_args.base={base}",
            f"--data.init_args.corpus={corpus}",
            "--data.init_args.dev_samples=2",
            "--data.init_args.batch_size=3",
            "--data.init_args.max_tokens=12",
            "--data.init_args.base_dtype=float32",
        ]
    )
    drafter = workplace / "runs" / "vlm_drafters" / "eagle3-qwen2-audio" / "drafter"
    settings = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    assert (settings["system"], settings["target"]) == (system, base.name)
    sounds: list[Any] = sorted(corpus.rglob("84-*.flac"))
    options: dict[str, Any] = {"model": base, "max_new_tokens": 16, "device": "cpu"}
    plain = mmdec.transcribe(sounds, drafter=None, **options)
    result = mmdec.transcribe(sounds, drafter=str(drafter), num_speculative_tokens=5, **options)
    assert [text.tokens for text in result] == [text.tokens for text in plain]


def test_recordings_are_chosen_and_joined(corpus: Path, tmp_path: Path) -> None:
    """Sounds of other lengths end in zeros, and a sound's mask is no mask of a text, however long."""
    base = write("AudioFlamingo3", tmp_path / "base")
    data = AudioData(str(base), str(corpus), train_split="train-clean-100", dev_split="dev-clean", samples=4)
    samples = data.samples["train"]
    assert len({sample.name for sample in samples}) == len(samples) == 4
    assert all(sample.visual and sample.question.startswith("TEXT") for sample in samples)
    single = [data.prompting(sample) for sample in samples]
    both = join(single, 0, left=True)
    assert len(both["input_features"]) == 4
    mark = load_audio_lm(base).model.config.audio_token_id
    assert [int((row == mark).sum()) for row in both["input_ids"]] == [
        int((prompt["input_ids"] == mark).sum()) for prompt in single
    ]
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "feature_attention_mask": torch.ones(1, 4)}
    assert append(inputs, [1, 2])["feature_attention_mask"].shape == (1, 4)
    with pytest.raises(InputError, match="audio language model"):
        _ = AudioData(str(corpus), str(corpus)).prompting
