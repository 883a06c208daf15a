"""Chooses the drafter for drafter="auto": one in the model's folder, one shipped for its weights, or "lookup".

The first of these that exists is taken. CTC heads for different languages are joined.

A folder of shipped drafters has a file `drafters.json`, which lists the drafters. The list is empty if the folder holds
only a confidence.json for the model. The file identifies the model by some values of each of its weight matrices. These
values are compared within a tolerance, because a copy in another dtype has rounded values. So every copy of the weights
is recognised, wherever it comes from.

A drafter that is damaged or does not fit is skipped with a warning, because the user has not chosen it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.checks.caller import warn_user
from mmdec.checks.weights import lies_inside, read_settings
from mmdec.drafters.built_in import FALLBACK_DRAFTER
from mmdec.drafters.ctc.drafter import CtcDrafter, MultilingualCtcDrafter
from mmdec.drafters.registry import auto_names, make_drafter
from mmdec.errors import InputError
from mmdec.hub.cache import path_version
from mmdec.hub.find import drafter_folder, model_folders
from mmdec.pretrained.drafters import load_drafter
from mmdec.targets.hf_target import source_folder
from mmdec.targets.registry import make_target
from mmdec.types import Drafter

SHIPPED_FILE = "drafters.json"
SHIPPED_FORMAT = "mmdec shipped drafters 1"
VALUES_PER_MATRIX = 2  # number of values of each weight matrix that are compared to recognise a model
# tolerances for equal weights that were rounded to another dtype
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 2**-8, 1e-7

Load = Callable[[Path], Drafter]
_loaded: WeakKeyDictionary[nn.Module, dict[object, Drafter]] = WeakKeyDictionary()
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # warnings already given for each model
_matches: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()
_lock = threading.RLock()


def auto_drafter(model: PreTrainedModel, folder: Path | None = None, load: Load | None = None) -> Drafter:
    """Choose the drafter for "auto".

    Args:
        model: The loaded target model.
        folder: The folder that it was loaded from; None: it is read from the model object.
        load: Makes the drafter from its folder. None: `load_drafter`; its result is reused while the folder is
            unchanged.

    Returns:
        The first drafter that fits: in the model's folder or next to it, else one shipped for its weights, else
        "lookup". If it is a CTC head that knows some languages only, it is joined with the CTC heads that follow: each
        row is drafted by the first of them that knows its language.
    """
    folder = folder or source_folder(model)
    heads: list[CtcDrafter] = []
    for path in (*_adjacent_folders(model, folder), *_shipped_folders(model)):
        try:
            drafter = (load or partial(_load_once, model))(path)
            drafter.check(make_target(model))
        except InputError as error:
            warn_once(model, f'drafter="auto" skips {path.name}, which cannot be used: {error}')
            continue
        if not isinstance(drafter, CtcDrafter):
            if not heads:
                return drafter
            break
        heads.append(drafter)
        if not drafter.languages:
            break
    if len(heads) > 1:
        return MultilingualCtcDrafter(heads)
    return heads[0] if heads else make_drafter(FALLBACK_DRAFTER)


def is_speech_model(model: PreTrainedModel) -> bool:
    """Return whether the model is a Whisper or another speech model, for which drafters of their own are trained."""
    return hasattr(model.config, "num_mel_bins")


def _adjacent_folders(model: PreTrainedModel, folder: Path | None) -> Iterator[Path]:
    """Yield the folders of drafters inside the model's folder or next to it, the preferred drafter first."""
    if folder is not None:
        parent = folder.resolve()
        names = auto_names(is_speech_model(model))
        if (parent / SHIPPED_FILE).is_file():  # lists the folder's drafters, the preferred one first
            names = tuple(name for name in read_settings(parent / SHIPPED_FILE).get("drafters", ()) if name in names)
        for name in names:
            path = drafter_folder(folder, name)
            if path is not None and (path.parent != parent or lies_inside(path, parent)):
                yield path


def shipped_folder(model: PreTrainedModel) -> Path | None:
    """Return the folder of drafters that is shipped for exactly these weights, in any dtype; None if there is none."""
    return next((file.parent for file in _matches_of(model)), None)


def _matches_of(model: PreTrainedModel) -> list[Path]:
    """Find each `drafters.json` that was shipped for this model's weights."""
    files = {
        file.parent.name: file for folder in reversed(model_folders()) for file in folder.glob(f"[!.]*/{SHIPPED_FILE}")
    }
    return [file for file in files.values() if is_shipped_for(model, file)]


def _shipped_folders(model: PreTrainedModel) -> Iterator[Path]:
    """Yield the folders of drafters that are shipped for the model's weights."""
    for file in _matches_of(model):
        yield from (file.parent / name for name in read_settings(file)["drafters"])


def is_shipped_for(model: PreTrainedModel, file: Path) -> bool:
    """Return whether the drafters that a `drafters.json` lists were shipped for this model's weights, in any dtype.

    Args:
        file: The `drafters.json`. A damaged file matches no model.
    """
    key = path_version(file)
    with _lock:
        matches = _matches.setdefault(model, {})
        if key not in matches:
            try:
                settings = read_settings(file)
                matches[key] = settings.get("format") == SHIPPED_FORMAT and _values_match(model, settings)
            except (InputError, KeyError, TypeError, ValueError):
                matches[key] = False
        return matches[key]


def _values_match(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    if settings["network"] != network_shape(model):
        return False
    values, expected = values_of(model), settings["values"]
    return len(values) == len(expected) and all(
        abs(value - stored) <= RELATIVE_TOLERANCE * abs(stored) + ABSOLUTE_TOLERANCE
        for value, stored in zip(values, expected, strict=True)
    )


def network_shape(model: PreTrainedModel) -> str:
    """Return a hash of the model's class and of its tensors' names and shapes; it does not depend on the dtype."""
    # only tensors are read, because the `state_dict` of a quantised model holds other objects, too
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    shapes = sorted((name, tuple(value.shape)) for name, value in tensors.items())
    return hashlib.blake2b(f"{type(model).__name__} {shapes}".encode(), digest_size=16).hexdigest()


@torch.no_grad()
def values_of(model: PreTrainedModel) -> list[float]:
    """Return two values of each weight matrix of the model, in the order of the matrices' names.

    Returns:
        [] if a matrix cannot be read or a value is not finite.
    """
    parts: list[Tensor] = []
    for _, value in sorted(model.state_dict().items()):
        if (
            not isinstance(value, Tensor)
            or value.ndim < 2
            or not value.is_floating_point()
            or value.numel() < VALUES_PER_MATRIX
        ):
            continue
        if value.is_meta or value.layout is not torch.strided or type(value) not in (Tensor, nn.Parameter):
            return []
        flat = value.reshape(-1)
        places = torch.arange(1, VALUES_PER_MATRIX + 1, device=value.device) * (len(flat) // (VALUES_PER_MATRIX + 1))
        parts.append(flat[places].float().cpu())
    values = [float(value) for value in torch.cat(parts).numpy()] if parts else []
    return values if all(map(math.isfinite, values)) else []


def _load_once(model: PreTrainedModel, folder: Path) -> Drafter:
    key = (path_version(folder), model.device, model.dtype)
    with _lock:
        drafters = _loaded.setdefault(model, {})
        if key not in drafters:
            drafters[key] = load_drafter(folder, model, "drafter")
        return drafters[key]


def warn_once(model: PreTrainedModel, message: str, reason: str = "") -> None:
    """Warn with `message`, once for each model and reason.

    Args:
        reason: "": the message itself.
    """
    with _lock:
        reasons = _warned.setdefault(model, set())
        if (reason or message) in reasons:
            return
        reasons.add(reason or message)
    warn_user(message, UserWarning)
