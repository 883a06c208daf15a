"""The CTC head's recipe runs as written on a tiny corpus and learns; resumed, it gives the same weights."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from mmdec.training.__main__ import main
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.ctc.evaluate import load_ears
from tests.support.quiet import LIGHTNING
from tests.support.tiny_sentences import SIZES, write

RECIPE = Path(__file__).parents[2] / "recipes" / "ctc" / "french.yaml"
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),  # pytest has arguments of its own
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ctc"))


def fit(corpus: Path, out: Path, *more: str) -> None:
    """The recipe with its own settings, but small: five steps an epoch, files under `out`."""
    main(
        [
            "fit",
            f"--config={RECIPE}",
            f"--trainer.default_root_dir={out}",
            f"--trainer.logger.init_args.save_dir={out}",
            f"--trainer.callbacks.dirpath={out / 'checkpoints'}",
            "--trainer.callbacks.save_top_k=-1",
            "--trainer.max_epochs=2",
            "--trainer.check_val_every_n_epoch=1",
            *(f"--model.init_args.{name}={value}" for name, value in SIZES.items()),
            "--model.init_args.warmup=2",
            "--model.init_args.lr=5e-3",
            f"--data.init_args.corpus={corpus / 'manifest.tsv'}",
            f"--data.init_args.encoder={corpus / 'whisper'}",
            f"--data.init_args.states={corpus / 'states'}",
            f"--data.init_args.pieces={corpus / 'pieces.json'}",
            f"--data.init_args.text=[{corpus / 'text'}]",
            "--data.init_args.count=40",
            "--data.init_args.batch_states=60",
            "--data.init_args.steps_per_epoch=5",
            *more,
        ]
    )


def test_the_recipe_learns_and_resumes_to_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    fit(corpus, tmp_path / "whole")
    folder = tmp_path / "whole" / "checkpoints"
    fit(corpus, tmp_path / "parts", f"--ckpt_path={folder / 'step=4.ckpt'}")
    last = "checkpoints/step=9.ckpt"
    whole, parts = (read_checkpoint(tmp_path / run / last)["state_dict"] for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with (tmp_path / "whole" / "log" / "metrics.csv").open(encoding="utf-8") as file:
        losses = [float(row["dev/ctc"]) for row in csv.DictReader(file) if row["dev/ctc"]]
    assert losses[-1] < losses[0]
    assert load_ears(tmp_path / "whole" / last, str(corpus / "whisper")).head.config.d_states == 32
