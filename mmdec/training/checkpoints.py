"""Lightning's checkpoints: writing, reading and averaging.

A file is written completely or not at all, and only if all weights are finite. Reading never runs code from a file.
"""

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
from transformers import PreTrainedTokenizerBase

from mmdec.checks.files import atomic_file, error_line, error_reason, open_regular, printable
from mmdec.checks.weights import check_finite_weights, is_finite, read_weights, weight_file
from mmdec.errors import EXIT_CODE_REFUSED, InputError, MmdecError

# Lightning (2.6) uses the class LeafSpec, which torch (2.11) has replaced by the function treespec_leaf.
_pytree.LeafSpec = treespec_leaf  # type: ignore[attr-defined, assignment] # this module does not export it

LEARNING_RATE_OPTIONS = ("lr", "learning_rate")  # option names under which recipes set the learning rate


class FiniteNumbers(Callback):
    """Ends training with an error if a loss after a step, or a weight after an epoch, is NaN or infinite.

    Several processes stop together at the next step. If one process stopped alone, the others would wait for it
    forever. State: `fault`, words that say what is not finite; "" while all is finite.
    """

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
        """Raise MmdecError if any process has found a loss or a weight that is NaN or infinite.

        All processes must call this.
        """
        if any_process(trainer, bool(self.fault)):
            if not trainer.is_global_zero:
                raise SystemExit(EXIT_CODE_REFUSED)  # end without a message, because process 0 prints the error
            raise divergence_error(
                self.fault or "another process has a loss that is not", trainer.global_step, pl_module.hparams
            )


def any_process(trainer: Trainer, flag: bool) -> bool:
    """Return whether `flag` is true in at least one process. All processes must call this function together."""
    return flag if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(flag, all=False)


def not_finite(state: Mapping[str, Tensor]) -> str:
    """Return words for a message: which weights of a state dict are NaN or infinite; "" if none are."""
    names = [name for name, value in state.items() if isinstance(value, Tensor) and not is_finite(value)]
    return f"{len(names)} of {len(state)} weights hold NaN or infinity, '{names[0]}' first" if names else ""


def divergence_error(fault: str, step: int, options: Mapping[str, Any]) -> MmdecError:
    """Build the error of a training whose loss or weights are not finite.

    Args:
        fault: Words for the message: what is not finite.
        options: The module's hyperparameters, with the learning rate.
    """
    key = next((name for name in LEARNING_RATE_OPTIONS if name in options), LEARNING_RATE_OPTIONS[0])
    now = f", which is {options[key]:g}" if isinstance(options.get(key), (int, float)) else ""
    return MmdecError(
        f"Loss and weights must stay finite, but after step {step}, {fault}. Lower `model.init_args.{key}`{now}. No "
        "checkpoint holds them."
    )


def _losses(trainer: Trainer, outputs: object) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, loss) of a training step.

    If the module calls its optimizers itself (manual optimization), yield all values that it logs in training.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, Tensor):
        yield "the loss", loss
        return
    for name, value in trainer.callback_metrics.items():
        if name.startswith("train/") and torch.is_tensor(value):
            yield name, value


# a URL's scheme such as http:, of two letters or more, so that a Windows drive `C:` does not match
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_STEP = re.compile(r"step=(\d+)\.ckpt")
# Lightning's name for a temporary file that passes weights from a forked process to its parent
HANDOVER_FILE = ".temp.ckpt"
# name of the option that holds the vocabulary, which the command line copies from the data module
VOCABULARY_OPTION = "units"
M = TypeVar("M", bound=nn.Module)


@final
class WholeCheckpoints(CheckpointIO):
    """Reads and writes checkpoints as local files, with checks that all weights are finite. It holds no state."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint. If this fails, an existing file at `path` is not changed.

        Raises:
            MmdecError: If a weight is not finite or the file cannot be written.
        """
        if Path(path).name != HANDOVER_FILE:
            fault = not_finite(checkpoint["state_dict"])
            if fault:
                raise divergence_error(fault, checkpoint["global_step"], checkpoint.get("hyper_parameters") or {})
        try:
            with atomic_file(check_local(path, "dirpath")) as file:
                torch.save(_without_units(checkpoint), file)
        except (OSError, RuntimeError) as error:  # after a system error, torch's writer raises RuntimeError
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise MmdecError(
                f"The checkpoint '{printable(os.fspath(path))}' cannot be written ({error_reason(cause)}). The "
                "existing file was not changed."
            ) from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU. Code in the file is never run, even if `weights_only` is false.

        Raises:
            InputError: For a damaged file; the message names the newest undamaged checkpoint in the same folder.
        """
        if Path(path).name == HANDOVER_FILE:
            return torch.load(path, map_location="cpu", weights_only=True)
        return read_resumed(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: a file, or the folder that some of Lightning's strategies write instead."""
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


def read_start(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read the weights that training begins from, by name.

    Args:
        path: A checkpoint file, or a folder with model.safetensors.
        prefix: Text to put before each name, if `path` is a folder.

    Raises:
        InputError: For damaged files.
    """
    if not path.is_dir():
        state: dict[str, Tensor] = read_checkpoint(path, "start")["state_dict"]
        return state
    from mmdec.nn.int8 import unpack_rows  # imported here, because it is rarely needed

    weights = unpack_rows(read_weights([weight_file(path, "model.safetensors", "start")], "start"), "start")
    return {prefix + name: tensor for name, tensor in weights.items()}


def check_local(path: str | os.PathLike[str], argument: str) -> Path:
    """Check that a path is on this machine, and return it.

    Args:
        argument: The option's name, for messages.

    Raises:
        InputError: For an address such as http:// or s3://.
    """
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise InputError(
            f"`{argument}` must be a path of this machine, but is '{printable(text)}'. Download it first, from a "
            "source that you trust; a file of this name is ./NAME."
        )
    return Path(text)


def read_checkpoint(path: Path, argument: str = "checkpoint") -> dict[str, Any]:
    """Read a Lightning checkpoint, which may hold only tensors and plain values.

    Args:
        argument: The option's name, for messages.

    Raises:
        InputError: If the file is damaged, holds other objects, or has weights that are not finite.
    """
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
        except Exception as error:  # all exceptions, because reading a damaged pickle may raise any of them
            fault = _fault(error, os.fstat(descriptor).st_size)
    if fault:
        raise InputError(
            f"`{argument}` must hold whole tensors and plain values, but '{printable(str(path))}' does not ({fault}). "
            "Train again, or take an earlier one."
        )
    check_finite_weights(checkpoint["state_dict"], path, argument)
    options = checkpoint.get("hyper_parameters")
    if VOCABULARY_OPTION in checkpoint and isinstance(options, dict):
        options[VOCABULARY_OPTION] = checkpoint.pop(VOCABULARY_OPTION)
    return checkpoint


def _without_units(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the checkpoint with `units`, the vocabulary, at the top level instead of in the hyperparameters.

    Otherwise jsonargparse (4.53) would copy all hyperparameters once for each token, which takes minutes.
    """
    options = dict(checkpoint.get("hyper_parameters") or {})
    if VOCABULARY_OPTION not in options:
        return checkpoint
    units = options.pop(VOCABULARY_OPTION)
    return {**checkpoint, "hyper_parameters": options, VOCABULARY_OPTION: units}


def _lacks(checkpoint: Any) -> str:
    if not isinstance(checkpoint, dict):
        return f"it holds a {type(checkpoint).__name__}"
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        return "it has no state_dict"
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)]
    return f"'{printable(str(wrong[0]))}' in its state_dict is not a tensor" if wrong else ""


def _fault(error: Exception, size: int) -> str:
    """Return words for a message: why a file could not be read.

    Args:
        size: The file's length in bytes.
    """
    if isinstance(error, zipfile.BadZipFile):
        return f"it is cut off or another file, {size} bytes long"
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code:
        return f"it asks for {printable(code.group(1))}, which would run code"
    return error_line(error)


def read_resumed(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the checkpoint to resume from.

    Raises:
        InputError: If it is damaged; the message names the newest undamaged checkpoint in the same folder.
    """
    file = check_local(path, "ckpt_path")
    try:
        return read_checkpoint(file, "ckpt_path")
    except InputError as error:
        good = newest_good(_step_checkpoints(file.parent), besides=file)
        hint = f" The newest good one there is '{good}': --ckpt_path=last takes it." if good else ""
        raise InputError(f"{error}{hint}") from error


def last_checkpoint(folders: Iterable[Path]) -> Path | None:
    """Return the checkpoint that --ckpt_path=last means: the newest last.ckpt in these folders.

    If it is damaged or missing, return the undamaged step=N.ckpt with the highest N.

    Returns:
        None if there is no checkpoint.

    Raises:
        InputError: If all are damaged.
    """
    places = list(folders)
    last = [path for folder in places for path in folder.glob("last*.ckpt")]
    steps = [path for folder in places for path in _step_checkpoints(folder)]
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
        rank_zero_info(f"{error} This run continues from '{good}'.")
        return good


def newest_good(paths: Iterable[Path], besides: Path) -> Path | None:
    """Return the undamaged checkpoint of the highest training step, with finite weights; None if there is none.

    Args:
        besides: A path to leave out.
    """
    for path in sorted(set(paths) - {besides}, key=_step, reverse=True):
        try:
            read_checkpoint(path)
        except InputError:
            continue
        return path
    return None


def newest_checkpoints(folder: Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a folder, by training step in ascending order.

    last.ckpt is ignored, because it is a copy.

    Raises:
        InputError: If the folder has no checkpoint.
    """
    numbered = sorted(_step_checkpoints(folder), key=_step)
    if not numbered:
        raise InputError(f"`folder` must hold checkpoints, but '{folder}' holds none. Train first.")
    return numbered[-count:]


def _step_checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step=*.ckpt") if _STEP.fullmatch(path.name)]


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


def load_averaged(build: Callable[..., M], checkpoints: Sequence[Path]) -> tuple[M, int]:
    """Load a training module, with the mean of the weights in several checkpoints.

    Args:
        build: The module's class, which is called with the hyperparameters, but without initial weights (`start`).

    Returns:
        The module in eval mode, and the training step of the last checkpoint.

    Raises:
        InputError: For checkpoints of another module.
    """
    last = read_checkpoint(checkpoints[-1])
    try:
        # Lightning stores data of its own under names with a leading underscore. They are not options of the module.
        options = {name: value for name, value in last["hyper_parameters"].items() if not name.startswith("_")}
        module = build(**{name: value for name, value in options.items() if name != "start"})
        step = int(last["global_step"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, MmdecError):
            raise
        raise InputError(
            f"`checkpoints` must be of this kind of training, but '{checkpoints[-1]}' is not ({error_line(error)}). "
            "Name others."
        ) from error
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    read = ((path, last if path == checkpoints[-1] else read_checkpoint(path)) for path in checkpoints)
    module.load_state_dict(average(_fitting(path, checkpoint, shapes) for path, checkpoint in read))
    return module.eval(), step


def _fitting(path: Path, checkpoint: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = checkpoint["state_dict"]
    for name in sorted(shapes.keys() | state.keys()):
        shape, expected_shape = tuple(state[name].shape) if name in state else "absent", shapes.get(name, "absent")
        if shape != expected_shape:
            raise InputError(
                f"`checkpoints` must hold a module's weights, but '{name}' in '{path}' is {shape} and not "
                f"{expected_shape}. Name others."
            )
    return state


def average(states: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each tensor over several state dicts. Integer tensors are taken from the last state dict."""
    total: dict[str, Tensor] = {}
    count = 0
    for state in states:
        count += 1
        for name, value in state.items():
            if value.is_floating_point():
                value = total[name] + value.double() if name in total else value.double()
            total[name] = value
    return {name: (value / count).float() if value.is_floating_point() else value for name, value in total.items()}


def check_positive(**counts: int) -> None:
    """Raise InputError if one of these options is below 1.

    Args:
        counts: The values, by the option's name.
    """
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"`{name}` must be at least 1, but is {value}.")


def token_list(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokenizer's vocabulary as tokens ordered by id. Models get it as their argument `units`."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)
