"""A checkout with a stand-in for DASpeech's training: it does not train, but writes the files that training writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from mmdec.training.corpora.cvss import read_pairs, vocabulary
from mmdec.training.daspeech import timed
from mmdec.training.daspeech.export import assemble
from mmdec.training.daspeech.module import DASpeechModule
from mmdec.training.timed_run import Allowance, Outcome
from tests.support.tiny_corpus import TinyCorpus
from tests.support.tiny_translator import tiny_sizes, tiny_vocoder

ROOT = Path(__file__).parents[2]
SHIPPED, MADE = Path("models/daspeech-phrasebook"), Path("runs/daspeech-phrasebook")
STAGES = ["units", "acoustic", "vocoder", "joint"]
BATCHES = 10  # batches that a checkpoint of a pretended run reports


def module(units: list[str], mu: float = 1.0, seed: int = 0) -> DASpeechModule:
    torch.manual_seed(seed)
    return DASpeechModule(units, size="small", mu=mu, model=tiny_sizes())


class Checkout:
    """A checkout with a corpus, a clock, and a runner that writes the files of a training stage without training."""

    def __init__(self, folder: Path, corpus: TinyCorpus) -> None:
        (folder / "data").mkdir()
        shutil.copytree(corpus.root, folder / "data" / "corpus")
        (folder / "recipes").symlink_to(ROOT / "recipes")
        self.corpus = TinyCorpus(folder / "data" / "corpus")
        self.units = vocabulary(read_pairs(self.corpus.common_voice, self.corpus.cvss, "train")[0])
        self.now = 1000.0
        self.calls: list[tuple[str, dict[str, Any], str | None]] = []

    def runner(self, name: str, *arguments: str) -> None:
        assert name == "mmdec.training"
        assert arguments[:2] == ("fit", "--config")
        config = yaml.safe_load(Path(arguments[2]).read_text(encoding="utf-8"))
        stage = Path(arguments[2]).parent.name
        resumed = arguments[4] if len(arguments) > 3 else None
        if resumed:
            assert Path(resumed).is_file()
        self.calls.append((stage, config, resumed))
        self.now = max(self.now, self.deadline(config)["at"])
        folder = Path("runs") / stage
        self.checkpoint(folder, stage)
        if stage == "acoustic":
            save_file({"x": torch.zeros(1)}, folder / "tts.safetensors")
        if stage == "vocoder":
            self.vocoder(folder)

    def checkpoint(self, folder: Path, stage: str, batches: int = BATCHES) -> None:
        made = module(self.units, mu=float(stage == "joint"), seed=len(self.calls))
        content = {
            "state_dict": made.state_dict(),
            "hyper_parameters": dict(made.hparams),
            "global_step": batches,
            "loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {"processed": batches}}}},
        }
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        for name in (f"step={batches}.ckpt", "last.ckpt"):
            torch.save(content, folder / "checkpoints" / name)

    def vocoder(self, folder: Path) -> None:
        vocoder = tiny_vocoder()
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.contiguous() for name, value in vocoder.state_dict().items()}
        save_file(state, folder / "vocoder.safetensors")
        (folder / "vocoder.json").write_text(json.dumps({"config": asdict(vocoder.config)}), encoding="utf-8")

    def ship(self) -> None:
        """Write a model into models/, and nothing into runs/."""
        scratch = Path("scratch")
        self.checkpoint(scratch, "joint", batches=7)
        self.vocoder(scratch)
        corpus = self.corpus
        checkpoint = [scratch / "checkpoints" / "step=7.ckpt"]
        assemble(checkpoint, scratch, corpus.common_voice, corpus.cvss, corpus.lexicon, SHIPPED)

    def train(self, minutes: float, fresh: bool = False, runner: Any = None) -> Outcome:
        """Run the timed training by this checkout's clock."""
        return timed.train(Allowance(self.now + 60 * minutes, lambda: self.now), runner or self.runner, fresh)

    @staticmethod
    def deadline(config: dict[str, Any]) -> dict[str, Any]:
        return config["trainer"]["callbacks"][-1]["init_args"]

    @property
    def stages(self) -> list[str]:
        return [stage for stage, _, _ in self.calls]

    def config(self, stage: str) -> dict[str, Any]:
        return next(config for name, config, _ in reversed(self.calls) if name == stage)


def weights(config: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("InitialWeights"))["init_args"]
