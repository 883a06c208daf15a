"""Reads and writes the files that translators of phones and of word pieces share.

These are the vocoder, lists of names, weights in half precision, and decoding options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from mmdec.checks.weights import build_with_weights, check_layer_counts, lies_inside, read_weights, weight_file
from mmdec.daspeech.options import STRATEGIES
from mmdec.daspeech.vocoder import OUR_MELS, HifiGanVocoder, MelKind, Vocoder, VocoderConfig
from mmdec.errors import InputError, MmdecError
from mmdec.nn.int8 import unpack_rows

VOCODER = "vocoder.safetensors"


@final
@dataclass(frozen=True)
class DecodingSettings:
    """A translator's decoding options, tuned on the dev split and stored in its folder."""

    strategy: str = "lookahead"  # the strategy if the caller gives none, one of `STRATEGIES`
    lookahead_weight: float = 1.0  # in "lookahead": factor on the log-probability of the next vertex's best token
    # in the Viterbi strategies: the score is divided by the path's number of vertices to this power
    length_penalty: float = 1.0
    collapse: bool = False  # whether equal neighbouring units are merged, as in the paper's published code


def check_decoding(decoding: DecodingSettings, graph: bool = True) -> DecodingSettings:
    """Return `decoding`; raise InputError if the model does not support its strategy.

    Args:
        graph: Whether the model has a graph decoder.
    """
    possible = STRATEGIES if graph else ("autoregressive",)
    if decoding.strategy not in possible:
        raise InputError(
            f"`model` must decode by one of {', '.join(possible)}, but its config says {decoding.strategy!r:.60}. "
            "Download it again."
        )
    return decoding


def read_vocoder(directory: Path, config: Mapping[str, Any]) -> Vocoder | HifiGanVocoder:
    """Load the vocoder in a translator's folder.

    Args:
        config: The content of config.json.

    Raises:
        InputError: If the file is damaged.
    """
    state = unpack_rows(read_weights([weight_file(directory, VOCODER)]))
    check_layer_counts(config["vocoder"], state)
    if "model_type" in config["vocoder"]:
        from mmdec.daspeech.hifigan import build_vocoder  # imported here because it imports transformers' models

        return build_vocoder(config["vocoder"], state, directory)
    sizes = VocoderConfig(**config["vocoder"])
    return build_with_weights(lambda: Vocoder(sizes), state, "model", directory)


def read_names(file: Path) -> list[str]:
    """Read a JSON list of names, which are ordered by id.

    Raises:
        InputError: If the file holds anything else.
    """
    try:
        names = json.loads(check_inside_folder(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"`model` must hold {file.name} as a JSON list, but '{file}' is damaged or of another version ({error}). "
            "Download it again."
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"`model` must hold {file.name} as a list of names, but '{file}' is not one. Download it again."
        )
    return names


def check_inside_folder(file: Path) -> Path:
    """Return `file`; raise InputError if it is a link that leads out of its folder."""
    if not lies_inside(file, file.parent):
        raise InputError(f"`model` must hold its tables in its own folder, but '{file}' lies outside. Copy it there.")
    return file


def to_half_precision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to half precision, on the CPU.

    Raises:
        MmdecError: If a value is too large for half precision.
    """
    halved = {name: (t.half() if t.is_floating_point() else t).detach().cpu().clone() for name, t in state.items()}
    check_half(halved)
    return halved


def check_half(state: Mapping[str, Tensor]) -> None:
    """Raise MmdecError for a tensor with values that are not finite, or too large for half precision."""
    damaged = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if damaged:
        raise MmdecError(
            f"`model` must fit half precision, but {damaged[0]} overflows or is not finite. Train it again."
        )


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, indented, with keys in their order."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe_vocoder(vocoder: Vocoder | HifiGanVocoder) -> dict[str, Any]:
    """Return the entry `vocoder` of config.json for a vocoder; `read_vocoder` reads it."""
    if isinstance(vocoder, Vocoder):
        return asdict(vocoder.config)
    from mmdec.daspeech.hifigan import vocoder_config

    return vocoder_config(vocoder)


def check_model_vocoder(vocoder: nn.Module, mels: MelKind = OUR_MELS) -> Vocoder | HifiGanVocoder:
    """Return the vocoder if it is the model's own, so that it can be saved.

    Args:
        mels: The kind of mels that the model makes.

    Raises:
        InputError: For a vocoder that the caller chose.
    """
    is_own = (
        vocoder.received == mels != OUR_MELS if isinstance(vocoder, HifiGanVocoder) else isinstance(vocoder, Vocoder)
    )
    if not is_own or not isinstance(vocoder, Vocoder | HifiGanVocoder):
        raise InputError(
            f"`vocoder` must be the model's own to be saved, but is a {type(vocoder).__name__}. Load the model "
            "without `vocoder`."
        )
    return vocoder
