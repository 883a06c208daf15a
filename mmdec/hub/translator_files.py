"""What both layouts of a translator's folder have alike: the vocoder, names, precision, and how a path is chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from mmdec.checks.errors import InputError, MmdecError
from mmdec.checks.weights import check_counts, checked_file, fill, lies_inside, read_weights
from mmdec.nn.vocoder import Vocoder, VocoderConfig

VOCODER = "vocoder.safetensors"
GRAPH_STRATEGIES = ("lookahead", "greedy", "viterbi", "joint-viterbi")
STRATEGIES = (*GRAPH_STRATEGIES, "autoregressive", "verified")


@final
@dataclass(frozen=True)
class Decoding:
    """How a translation is chosen. Tuned on the dev split and stored with the model.

    strategy: where the caller names none.
    """

    strategy: str = "lookahead"
    lookahead_weight: float = 1.0
    length_penalty: float = 1.0
    collapse: bool = False  # merge equal neighbours, as the paper's released code does


def check_decoding(decoding: Decoding, graph: bool = True) -> Decoding:
    """Raise InputError for a strategy that the model has not. graph: whether it has one."""
    possible = STRATEGIES if graph else ("autoregressive",)
    if decoding.strategy not in possible:
        raise InputError(
            f"`model` must decode by one of {', '.join(possible)}, but its config says {decoding.strategy!r:.60}. "
            "Fetch it again."
        )
    return decoding


def read_vocoder(directory: Path, config: Mapping[str, Any]) -> Vocoder:
    """The model's own. Raises InputError if its file is damaged."""
    state = read_weights([checked_file(directory, VOCODER)])
    check_counts(config["vocoder"], state)
    sizes = VocoderConfig(**config["vocoder"])
    return fill(lambda: Vocoder(sizes), state, "model", directory)


def names(file: Path) -> list[str]:
    """A JSON list of names, in the order of their ids. Raises InputError for another file."""
    try:
        found = json.loads(inside(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"`model` must hold {file.name} as a JSON list, but '{file}' is damaged or of another version ({error}). "
            "Fetch it again."
        ) from error
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise InputError(f"`model` must hold {file.name} as a list of names, but '{file}' is none. Fetch it again.")
    return found


def inside(file: Path) -> Path:
    """The file itself. Raises InputError for a link that leads out of its folder."""
    if not lies_inside(file, file.parent):
        raise InputError(f"`model` must hold its tables in its own folder, but '{file}' lies outside. Copy it there.")
    return file


def half(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in half precision, on the CPU. Raises MmdecError for those that it cannot hold."""
    kept = {name: (t.half() if t.is_floating_point() else t).detach().cpu().clone() for name, t in state.items()}
    check_half(kept)
    return kept


def check_half(state: Mapping[str, Tensor]) -> None:
    """Raise MmdecError for a tensor that is not finite, or no longer is."""
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise MmdecError(
            f"`model` must fit half precision, but {broken[0]} overflows or is not finite. Train it again."
        )


def write_json(path: Path, value: Any) -> None:
    """Readable, and in the order of the value."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_model_vocoder(vocoder: nn.Module) -> Vocoder:
    """The model's own, which can be saved. Raises InputError for another one."""
    if not isinstance(vocoder, Vocoder):
        raise InputError(
            f"`vocoder` must be the model's own to be saved, but is a {type(vocoder).__name__}. Load the model "
            "without `vocoder`."
        )
    return vocoder
