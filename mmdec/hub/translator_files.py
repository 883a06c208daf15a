"""The parts that both layouts of a translator's folder have: vocoder, lists of names, precision, decoding options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from mmdec.checks.weights import check_counts, checked_file, fill, lies_inside, read_weights
from mmdec.nn.int8 import unpack_rows
from mmdec.nn.vocoder import OURS, HifiGanVocoder, MelKind, Vocoder, VocoderConfig
from mmdec.types import InputError, MmdecError

VOCODER = "vocoder.safetensors"
GRAPH_STRATEGIES = ("lookahead", "greedy", "viterbi", "joint-viterbi", "beam")
JUDGED = ("reranked", "autoregressive", "verified")  # those that need the autoregressive decoder
STRATEGIES = (*GRAPH_STRATEGIES, *JUDGED)


@final
@dataclass(frozen=True)
class Decoding:
    """Options of decoding, tuned on the dev split and stored with the model. See `mmdec.ops.dag_decode`."""

    strategy: str = "lookahead"  # one of `STRATEGIES`, used if the caller gives none
    lookahead_weight: float = 1.0  # weight of emission scores in "lookahead"
    length_penalty: float = 1.0  # exponent of a path's length in the Viterbi strategies
    collapse: bool = False  # merge equal neighbours, as the paper's released code does


def check_decoding(decoding: Decoding, graph: bool = True) -> Decoding:
    """Return `decoding`. Raises InputError for a strategy that the model does not have. graph: whether it has a graph
    decoder."""
    possible = STRATEGIES if graph else ("autoregressive",)
    if decoding.strategy not in possible:
        raise InputError(
            f"`model` must decode by one of {', '.join(possible)}, but its config says {decoding.strategy!r:.60}. "
            "Fetch it again."
        )
    return decoding


def read_vocoder(directory: Path, config: Mapping[str, Any]) -> Vocoder | HifiGanVocoder:
    """Read the model's own vocoder. Raises InputError if its file is damaged."""
    state = unpack_rows(read_weights([checked_file(directory, VOCODER)]))
    check_counts(config["vocoder"], state)
    if "model_type" in config["vocoder"]:
        from mmdec.hub.hifigan import build  # imported here because it imports transformers' models

        return build(config["vocoder"], state, directory)
    sizes = VocoderConfig(**config["vocoder"])
    return fill(lambda: Vocoder(sizes), state, "model", directory)


def names(file: Path) -> list[str]:
    """Read a JSON list of names, in the order of their ids. Raises InputError if the file holds anything else."""
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
    """Return the file. Raises InputError if it is a link out of its folder."""
    if not lies_inside(file, file.parent):
        raise InputError(f"`model` must hold its tables in its own folder, but '{file}' lies outside. Copy it there.")
    return file


def half(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to half precision, on the CPU. Raises MmdecError if a value is too large for it."""
    kept = {name: (t.half() if t.is_floating_point() else t).detach().cpu().clone() for name, t in state.items()}
    check_half(kept)
    return kept


def check_half(state: Mapping[str, Tensor]) -> None:
    """Raise MmdecError for a tensor with values that are not finite, or too large for half precision."""
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise MmdecError(
            f"`model` must fit half precision, but {broken[0]} overflows or is not finite. Train it again."
        )


def write_json(path: Path, value: Any) -> None:
    """Write JSON with indentation, and with keys in the given order."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe_vocoder(vocoder: Vocoder | HifiGanVocoder) -> dict[str, Any]:
    """Return the vocoder's entry in config.json, which `read_vocoder` reads."""
    if isinstance(vocoder, Vocoder):
        return asdict(vocoder.config)
    from mmdec.hub.hifigan import describe

    return describe(vocoder)


def check_model_vocoder(vocoder: nn.Module, mels: MelKind = OURS) -> Vocoder | HifiGanVocoder:
    """Return the vocoder if it is the model's own, which can be saved. Raises InputError for another one."""
    own = vocoder.given == mels != OURS if isinstance(vocoder, HifiGanVocoder) else isinstance(vocoder, Vocoder)
    if not own or not isinstance(vocoder, Vocoder | HifiGanVocoder):
        raise InputError(
            f"`vocoder` must be the model's own to be saved, but is a {type(vocoder).__name__}. Load the model "
            "without `vocoder`."
        )
    return vocoder
