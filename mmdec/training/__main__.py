"""`python -m mmdec.training fit --config recipes/daspeech/phrasebook/units.yaml`: Lightning's own command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

import mmdec.training.lightning_leaves  # noqa: F401 # imported for its effect
from mmdec.checks.devices import fast_bfloat16
from mmdec.checks.errors import MmdecError
from mmdec.checks.processes import end_as_told
from mmdec.training.callbacks import WholeEpochs


def _units(data: LightningDataModule) -> list[str]:
    return data.units  # type: ignore[attr-defined] # every data module here has them


@rank_zero_only
def keep_metrics(folder: Path) -> None:
    """Rename an earlier run's metrics.csv to metrics-1.csv (or the next number): Lightning (2.6) would delete it."""
    log = folder / "metrics.csv"
    if not log.is_file():
        return
    number = 1
    while (kept := folder / f"metrics-{number}.csv").exists():
        number += 1
    log.rename(kept)


class TrainingCLI(LightningCLI):
    """LightningCLI in subclass mode; what the model must know of the data is linked, not written twice."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data", "model.init_args.units", compute_fn=_units, apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """A recipe's bfloat16 on a CPU that is slow in it becomes float32, with a word."""
        trainer = self.config[self.subcommand].get("trainer", {}) if self.subcommand else self.config.get("trainer", {})
        cpu = trainer.get("accelerator") == "cpu" or not torch.cuda.is_available()
        if cpu and trainer.get("precision") == "bf16-mixed" and not fast_bfloat16(torch.device("cpu")):
            rank_zero_info("trainer.precision: 32-true, for this processor is slow in bfloat16 (no AVX-512).")
            trainer["precision"] = "32-true"

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # What Lightning says as it makes one is about products of its own; what recipes report comes later.
        heard = logging.getLogger("lightning.pytorch")
        level = heard.level
        heard.setLevel(logging.WARNING)
        try:
            trainer = super().instantiate_trainer(**kwargs)
        finally:
            heard.setLevel(level)
        trainer.callbacks.append(WholeEpochs())  # type: ignore[attr-defined]  # set by Lightning, undeclared
        return trainer

    def before_fit(self) -> None:
        for logger in self.trainer.loggers:
            if isinstance(logger, CSVLogger):
                keep_metrics(Path(logger.log_dir))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, or what is given in its place."""
    TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=None if arguments is None else list(arguments),
    )


def command_line(arguments: Sequence[str] | None = None) -> None:
    """`main` for people: what mmdec refuses, also inside the parser's errors, is one sentence on stderr; code 2."""
    try:
        main(arguments)
    except Exception as error:
        told: BaseException | None = error
        while told is not None and not isinstance(told, MmdecError):
            told = told.__cause__
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    end_as_told()
    command_line()
