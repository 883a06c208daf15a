"""The command line of all training: Lightning's CLI.

A recipe is a YAML file with the options of one training, for example:
`python -m mmdec.training fit --config recipes/base.yaml --config recipes/daspeech/phrasebook/units.yaml`.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from mmdec.checks.devices import has_fast_bfloat16
from mmdec.checks.files import TEMPORARY_PREFIX, error_line
from mmdec.errors import InputError, MmdecError, exit_on_error
from mmdec.training.callbacks import Resumption, Termination, lightning_log_level
from mmdec.training.checkpoints import FiniteNumbers, WholeCheckpoints, check_local, last_checkpoint, read_resumed
from mmdec.training.processes import child_environment, end_with_named_parent, lock_folder

set_parsing_settings(config_read_mode_fsspec_enabled=False)  # a recipe names classes to run, so it must be a local file

CHECKPOINT_KEYWORDS = ("best", "last", "hpc")  # values of --ckpt_path that are keywords, not file names


def _units(data: LightningDataModule) -> list[str]:
    return data.units  # type: ignore[attr-defined] # every data module here defines `units`


@rank_zero_only
def keep_metrics(folder: Path) -> None:
    """Rename metrics.csv of an earlier training run to metrics-1.csv (or the next free number).

    Otherwise Lightning (2.6) would delete it.
    """
    log = folder / "metrics.csv"
    if not log.is_file():
        return
    number = 1
    while (backup := folder / f"metrics-{number}.csv").exists():
        number += 1
    log.rename(backup)


class TrainingCLI(LightningCLI):
    """LightningCLI for all recipes. It passes the data module's vocabulary to the model as the argument `units`.

    It adds exact resumption, an error for NaN losses or weights, an orderly end after SIGTERM, and locks of the output
    folders. State: `locks`, those of the folders.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        termination = Termination()
        # no distributed sampler: each data module already divides its batches among the processes
        always = {"callbacks": [Resumption(), FiniteNumbers(), termination], "use_distributed_sampler": False}
        with ExitStack() as self.locks, termination.handle_sigterm(), warnings.catch_warnings():
            # this warning is wrong here: `Resumption` makes the data loader resumable
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
            # this warning is harmless: a short training may have fewer batches than Lightning's interval of logging
            warnings.filterwarnings("ignore", ".*smaller than the logging interval")
            try:
                super().__init__(*args, **{"trainer_defaults": always, **kwargs})
            except Exception as error:
                if isinstance(error, MmdecError) or not self._restoring():
                    raise
                raise InputError(
                    f"`ckpt_path` must be a checkpoint of this recipe, but '{self.trainer.ckpt_path}' does not fit it "
                    f"({error_line(error)}). Use one that this recipe wrote."
                ) from error

    def _restoring(self) -> bool:
        """Return whether Lightning is restoring a checkpoint now.

        If so, a raised error comes from the checkpoint.
        """
        trainer = getattr(self, "trainer", None)
        return trainer is not None and bool(trainer._checkpoint_connector._loaded_checkpoint)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and check the checkpoint --ckpt_path before Lightning takes the model's options from it.

        Raises:
            InputError: If the checkpoint is damaged or belongs to another model class.
        """
        super().parse_arguments(parser, args)
        recipe = self.config.get(str(self.config.get("subcommand"))) or {}
        path = recipe.get("ckpt_path")
        if not path or path in CHECKPOINT_KEYWORDS:
            return
        written = read_resumed(path).get("hyper_parameters", {}).get("_class_path")
        expected = (recipe.get("model") or {}).get("class_path")
        if written and expected and written != expected:
            raise InputError(
                f"`ckpt_path` must be a checkpoint of {expected}, the recipe's class, but '{path}' is of {written}. "
                "Use one that this recipe wrote."
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data", "model.init_args.units", compute_fn=_units, apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Complete the trainer's options.

        Checkpoints and metrics are written to `default_root_dir` if the recipe names no other folder. float32 replaces
        bfloat16 if this CPU is slow in bfloat16; this is logged.
        """
        trainer = self._get(self.config, "trainer")
        if root := trainer.get("default_root_dir"):
            if trainer.get("logger") is None:
                options = Namespace(save_dir=str(root), name="log", version="")
                trainer["logger"] = Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=options)
            for callback in trainer.get("callbacks") or []:
                if callback.class_path.endswith(".ModelCheckpoint") and callback.init_args.dirpath is None:
                    callback.init_args.dirpath = str(Path(root) / "checkpoints")
        cpu = trainer.get("accelerator") == "cpu" or not torch.cuda.is_available()
        if cpu and trainer.get("precision") == "bf16-mixed" and not has_fast_bfloat16(torch.device("cpu")):
            rank_zero_info("trainer.precision: 32-true, because this CPU is slow in bfloat16 (no AVX-512).")
            trainer["precision"] = "32-true"

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # Lightning's messages below level WARNING advertise its products, so these messages are hidden.
        with lightning_log_level(logging.WARNING):
            plugins = self._get(self.config_init, "trainer").get("plugins") or []
            plugins = [*(plugins if isinstance(plugins, list) else [plugins]), WholeCheckpoints()]
            return super().instantiate_trainer(**kwargs, plugins=plugins)

    def before_fit(self) -> None:
        if rank_zero_only.rank == 0 and not self.trainer.fast_dev_run:  # type: ignore[attr-defined] # undeclared
            self._hold_folders()
        self._find_last()
        for logger in self.trainer.loggers:
            if isinstance(logger, CSVLogger):
                keep_metrics(Path(logger.log_dir))

    def before_validate(self) -> None:
        self._find_last()

    before_test = before_predict = before_validate

    def _find_last(self) -> None:
        """Replace --ckpt_path=last by the newest undamaged checkpoint in the recipe's checkpoint folders.

        If there is no checkpoint, replace it by None.
        """
        options = self.config_init[str(self.subcommand)]
        if options.get("ckpt_path") == "last":
            folders = self._checkpoint_folders()
            checkpoint = last_checkpoint(folders)
            if checkpoint is None:
                rank_zero_info(f"No checkpoint in {', '.join(map(str, folders))}: this run starts from the beginning.")
            options["ckpt_path"] = None if checkpoint is None else str(checkpoint)

    def _hold_folders(self) -> None:
        """Lock the folders where this training writes, and delete the half-written files of killed processes."""
        root = self._get(self.config_init, "trainer").get("default_root_dir")
        folders = self._checkpoint_folders()
        runs = {check_local(root, "default_root_dir").resolve()} if root else set()
        for folder in sorted(runs | {folder.resolve().parent for folder in folders}):
            self.locks.enter_context(lock_folder(folder, f"python -m mmdec.training {self.subcommand}"))
        for part in (part for folder in folders for part in folder.glob(f"{TEMPORARY_PREFIX}*.part")):
            part.unlink(missing_ok=True)

    def _checkpoint_folders(self) -> list[Path]:
        paths = (
            callback.dirpath for callback in self.trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)
        )
        return [check_local(folder, "dirpath") for folder in dict.fromkeys(paths) if folder]


def main(arguments: Sequence[str] | None = None) -> TrainingCLI:
    """Run the training command line.

    Args:
        arguments: The command line's words; None: those of this process.

    Returns:
        The CLI object.
    """
    return TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=None if arguments is None else list(arguments),
    )


def command_line(arguments: Sequence[str] | None = None) -> None:
    """Run `main`; print an mmdec error, such as InputError, without a traceback.

    It is printed on stderr, and the exit code is 2.
    """
    with exit_on_error():
        main(arguments)


if __name__ == "__main__":
    end_with_named_parent()
    os.environ.update(child_environment())  # child processes then end together with this one
    command_line()
