"""The reader's recipe runs as written on tiny text and learns to translate it; resumed, it gives the same weights."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from mmdec.training.__main__ import main
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.reader.evaluate import load_reader
from tests.support.quiet import LIGHTNING
from tests.support.tiny_sentences import write_pairs

RECIPE = Path(__file__).parents[2] / "recipes" / "reader" / "text.yaml"
SIZES = {"d_model": 32, "ffn": 32, "heads": 2, "layers": 1, "decoder_layers": 1, "dropout": 0.0}
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),  # pytest has arguments of its own
]


def fit(text: Path, out: Path, *more: str) -> None:
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
            "--model.init_args.lr=1e-2",
            f"--data.init_args.text=[{text / 'first'},{text / 'second'}]",
            f"--data.init_args.pieces={text / 'pieces.json'}",
            f"--data.init_args.english={text / 'english.json'}",
            "--data.init_args.count=60",
            "--data.init_args.written=80",
            "--data.init_args.batch_pieces=160",
            "--data.init_args.steps_per_epoch=6",
            *more,
        ]
    )


def test_the_recipe_learns_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    text = write_pairs(tmp_path)
    fit(text, tmp_path / "whole")
    fit(text, tmp_path / "parts", f"--ckpt_path={tmp_path / 'whole' / 'checkpoints' / 'step=5.ckpt'}")
    last = "checkpoints/step=11.ckpt"
    whole, parts = (read_checkpoint(tmp_path / run / last)["state_dict"] for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with (tmp_path / "whole" / "log" / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dev/ar"]]
    assert float(rows[-1]["dev/ar"]) < 0.85 * float(rows[0]["dev/ar"])
    assert 0 <= float(rows[-1]["dev/ar_bleu"]) <= 100


def test_a_graph_is_added_to_what_was_trained_and_learns(tmp_path: Path) -> None:
    text = write_pairs(tmp_path)
    fit(text, tmp_path / "first", "--trainer.max_epochs=1")
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    more = ["graph_layers=1", f"start={last}", "glat_steps=12", "ar_weight=0.5"]
    fit(text, tmp_path / "graph", *(f"--model.init_args.{option}" for option in more))
    with (tmp_path / "graph" / "log" / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dev/dag"]]
    assert float(rows[-1]["dev/dag"]) < 0.9 * float(rows[0]["dev/dag"])
    assert 0 <= float(rows[-1]["dev/dag_bleu"]) <= 100
    assert float(rows[-1]["dev/invalid"]) == 0
    assert load_reader(tmp_path / "graph" / "checkpoints" / "last.ckpt").decoder is not None
