"""Lightning's checkpoints: written whole and finite or not at all, read without running code, found, averaged."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities import _pytree, rank_zero_info
from torch import Tensor, nn
from torch.utils._pytree import treespec_leaf

from mmdec.checks.files import one_line, open_regular, printable, reason, whole_file
from mmdec.checks.weights import check_finite_weights, checked_file, is_finite, read_weights
from mmdec.nn.row_int8 import unpack_rows
from mmdec.types import REFUSED, InputError, MmdecError

# Lightning (2.6) makes the leaves of its trees by a class that torch (2.11) has replaced by a function: it gets that.
_pytree.LeafSpec = treespec_leaf  # type: ignore[attr-defined, assignment] # imported there for its own use

RATES = ("lr", "learning_rate")  # the recipes' keys of the learning rate


class FiniteNumbers(Callback):
    """Looks at each step's loss, and at the weights where an epoch ends. Several processes end together, at the next
    step: one that went on alone would wait for the others."""

    def __init__(self) -> None:
        self.fault = ""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for name, value in _losses(trainer, outputs):
            if not is_finite(value):
                self.fault = f"{name} is {float(value.detach().float().mean())}"
                break
        if trainer.world_size == 1:
            self._end(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fault = self.fault or not_finite(pl_module.state_dict())
        self._end(trainer, pl_module)

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise MmdecError if there is a fault in any process."""
        if any_process(trainer, bool(self.fault)):
            if not trainer.is_global_zero:
                raise SystemExit(REFUSED)  # one process says it
            raise diverged(
                self.fault or "another process has a loss that is not", trainer.global_step, pl_module.hparams
            )


def any_process(trainer: Trainer, flag: bool) -> bool:
    """Whether the flag is set in one process at least. All processes must ask."""
    return flag if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(flag, all=False)


def check_finite_training(state: Mapping[str, Tensor], step: int, options: Mapping[str, Any] | None) -> None:
    """Raise MmdecError for weights that must not become a checkpoint. options: the module's hyperparameters."""
    fault = not_finite(state)
    if fault:
        raise diverged(fault, step, options or {})


def not_finite(state: Mapping[str, Tensor]) -> str:
    """Which weights are not finite, in a few words; "" where all are."""
    names = [name for name, value in state.items() if isinstance(value, Tensor) and not is_finite(value)]
    return f"{len(names)} of {len(state)} weights hold NaN or infinity, '{names[0]}' first" if names else ""


def diverged(fault: str, step: int, options: Mapping[str, Any]) -> MmdecError:
    """The error of a run that left the finite numbers."""
    key = next((name for name in RATES if name in options), RATES[0])
    now = f", which is {options[key]:g}" if isinstance(options.get(key), (int, float)) else ""
    return MmdecError(
        f"Loss and weights must stay finite, but after step {step}, {fault}. Lower `model.init_args.{key}`{now}. No "
        "checkpoint holds them."
    )


def _losses(trainer: Trainer, outputs: object) -> Iterator[tuple[str, Tensor]]:
    """What was minimised: the step's loss, or all that was logged where a module takes its own steps."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, Tensor):
        yield "the loss", loss
        return
    for name, value in trainer.callback_metrics.items():
        if name.startswith("train/") and torch.is_tensor(value):
            yield name, value


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # of two letters and more: `C:` is a drive
_STEP = re.compile(r"step=(\d+)\.ckpt")
UNITS = "units"  # the option that is linked from the data
M = TypeVar("M", bound=nn.Module)


@final
class WholeCheckpoints(CheckpointIO):
    """Reads and writes a run's checkpoints as files of this machine."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a file that is whole, or none. Raises MmdecError for weights that are not finite, and where the file
        cannot be written; then an earlier one is as it was."""
        check_finite_training(checkpoint["state_dict"], checkpoint["global_step"], checkpoint.get("hyper_parameters"))
        try:
            with whole_file(check_local(path, "dirpath")) as file:
                torch.save(_without_units(checkpoint), file)
        except (OSError, RuntimeError) as error:  # of the system; of torch's writer, after one of the system
            told = error.__context__ if isinstance(error.__context__, OSError) else error
            raise MmdecError(
                f"The checkpoint '{printable(os.fspath(path))}' cannot be written ({reason(told)}). What was there "
                "before is as it was."
            ) from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """`read_resumed`: code is never run, whatever `weights_only` says."""
        return read_resumed(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or the folder of a strategy that writes one."""
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


def read_start(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Weights to begin from: those of a checkpoint, or of a translator's folder, each name behind `prefix`.

    Raises InputError for what is damaged.
    """
    if not path.is_dir():
        state: dict[str, Tensor] = read_checkpoint(path, "start")["state_dict"]
        return state
    weights = unpack_rows(read_weights([checked_file(path, "model.safetensors", "start")], "start"))
    return {prefix + name: tensor for name, tensor in weights.items()}


def check_local(path: str | os.PathLike[str], argument: str) -> Path:
    """The path of a file of this machine. Raises InputError for an address: http://, s3:// and all others."""
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise InputError(
            f"`{argument}` must be a path of this machine, but is '{printable(text)}'. Fetch it first, from people "
            "whom you trust; a file of this name is ./NAME."
        )
    return Path(text)


def read_checkpoint(path: Path, argument: str = "checkpoint") -> dict[str, Any]:
    """One Lightning checkpoint, tensors and plain values only. Raises InputError for one that is damaged, holds more
    than that, or weights that are not finite."""
    with open_regular(path, argument) as descriptor, open(descriptor, "rb", closefd=False) as file:
        checkpoint: Any = None
        try:
            with zipfile.ZipFile(file) as records:
                damaged = records.testzip()
            if damaged is not None:
                fault = f"its record '{printable(damaged)}' is damaged"
            else:
                file.seek(0)
                checkpoint = torch.load(file, map_location="cpu", weights_only=True)
                fault = _lacks(checkpoint)
        except Exception as error:  # a damaged pickle may raise anything
            fault = _fault(error, os.fstat(descriptor).st_size)
    if fault:
        raise InputError(
            f"`{argument}` must hold whole tensors and plain values, but '{printable(str(path))}' does not ({fault}). "
            "Train again, or take an earlier one."
        )
    check_finite_weights(checkpoint["state_dict"], path, argument)
    options = checkpoint.get("hyper_parameters")
    if UNITS in checkpoint and isinstance(options, dict):
        options[UNITS] = checkpoint.pop(UNITS)
    return checkpoint


def _without_units(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The same with the list of units beside the hyperparameters: a resumed run has it from the data, and the command
    line's parser (jsonargparse 4.53) copies all that it knows for each entry of a list among them, minutes in all."""
    options = dict(checkpoint.get("hyper_parameters") or {})
    if UNITS not in options:
        return checkpoint
    units = options.pop(UNITS)
    return {**checkpoint, "hyper_parameters": options, UNITS: units}


def _lacks(checkpoint: Any) -> str:
    if not isinstance(checkpoint, dict):
        return f"it holds a {type(checkpoint).__name__}"
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        return "it has no state_dict"
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)]
    return f"'{printable(str(wrong[0]))}' in its state_dict is no tensor" if wrong else ""


def _fault(error: Exception, size: int) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, zipfile.BadZipFile):
        return f"it is cut off or another file, {size} bytes long"
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code:
        return f"it asks for {printable(code.group(1))}, which would run code"
    return one_line(error)


def read_resumed(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint that a run goes on with. Raises InputError for a bad one, with the newest good one beside it."""
    file = check_local(path, "ckpt_path")
    try:
        return read_checkpoint(file, "ckpt_path")
    except InputError as error:
        good = newest_good(_numbered(file.parent), besides=file)
        hint = f" The newest good one there is '{good}': --ckpt_path=last takes it." if good else ""
        raise InputError(f"{error}{hint}") from error


def last_checkpoint(folders: Iterable[Path]) -> Path | None:
    """What --ckpt_path=last means: the newest last.ckpt, or, where that is bad, the newest good step=N.ckpt; None where
    there is no checkpoint. Raises InputError where none is good."""
    places = list(folders)
    last = [path for folder in places for path in folder.glob("last*.ckpt")]
    steps = [path for folder in places for path in _numbered(folder)]
    there = [
        *sorted(last, key=lambda path: path.lstat().st_mtime, reverse=True)[:1],
        *sorted(steps, key=_step, reverse=True),
    ]
    if not there:
        return None
    try:
        read_checkpoint(there[0], "ckpt_path")
        return there[0]
    except InputError as error:
        good = newest_good(steps, besides=there[0])
        if good is None:
            raise InputError(f"{error} No other one there is good.") from error
        rank_zero_info(f"{error} This run goes on from '{good}'.")
        return good


def newest_good(paths: Iterable[Path], besides: Path) -> Path | None:
    """The whole and finite one of the highest step; None if there is none."""
    for path in sorted(set(paths) - {besides}, key=_step, reverse=True):
        try:
            read_checkpoint(path)
        except InputError:
            continue
        return path
    return None


def newest(folder: Path, count: int) -> list[Path]:
    """The last `count` checkpoints by step, without last.ckpt's copy."""
    numbered = sorted(_numbered(folder), key=_step)
    if not numbered:
        raise InputError(f"`folder` must hold checkpoints, but '{folder}' holds none. Train first.")
    return numbered[-count:]


def _numbered(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step=*.ckpt") if _STEP.fullmatch(path.name)]


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


def load_averaged(build: Callable[[dict[str, Any]], M], checkpoints: Sequence[Path]) -> tuple[M, int]:
    """A training module with the averaged weights of its checkpoints, and the last one's step.

    build: makes the module from the hyperparameters. Raises InputError for checkpoints of other modules.
    """
    last = read_checkpoint(checkpoints[-1])
    try:
        # Names with an underscore are the command line's own notes.
        module = build({name: value for name, value in last["hyper_parameters"].items() if not name.startswith("_")})
        step = int(last["global_step"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, MmdecError):
            raise
        raise InputError(
            f"`checkpoints` must be of this kind of training, but '{checkpoints[-1]}' is not ({one_line(error)}). Name "
            "others."
        ) from error
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    read = ((path, last if path == checkpoints[-1] else read_checkpoint(path)) for path in checkpoints)
    module.load_state_dict(average(_fitting(path, checkpoint, shapes) for path, checkpoint in read))
    return module.eval(), step


def _fitting(path: Path, checkpoint: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = checkpoint["state_dict"]
    for name in sorted(shapes.keys() | state.keys()):
        found, own = tuple(state[name].shape) if name in state else "absent", shapes.get(name, "absent")
        if found != own:
            raise InputError(
                f"`checkpoints` must hold a module's weights, but '{name}' in '{path}' is {found} and not {own}. Name "
                "others."
            )
    return state


def average(states: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several state dicts; integers are taken from the last."""
    total: dict[str, Tensor] = {}
    count = 0
    for state in states:
        count += 1
        for name, value in state.items():
            total[name] = (
                total[name] + value.double()
                if name in total and value.is_floating_point()
                else (value.double() if value.is_floating_point() else value)
            )
    return {name: (value / count).float() if value.is_floating_point() else value for name, value in total.items()}
