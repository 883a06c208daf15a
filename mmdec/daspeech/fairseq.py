"""Converts the checkpoints that DASpeech's authors published, which have fairseq's format, to mmdec's folders.

The folder to convert holds the checkpoint (one .pt file); config.yaml, which its training read; the dictionary and the
global mel statistics, which config.yaml names; and HiFi-GAN's generator (g_02500000 or generator_v1) with its
config.json. Only tensors and plain values are read from the pickles.

Differences that the conversion removes: fairseq numbers positions from 2, has separate weights for keys and values,
copies the embedding to the output projection, and stores the bins of pitch and energy outside the weights. The
sinusoids of fairseq's FastSpeech 2 have other frequencies, which `FastSpeech2Config.positions` reproduces.

References:
    github.com/ictnlp/DASpeech (65c3684).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import yaml
from torch import Tensor

from mmdec.checks.weights import build_with_weights, check_finite_weights, read_pickle, report_damage
from mmdec.daspeech.acoustic import FastSpeech2Config
from mmdec.daspeech.checkpoint import save_model
from mmdec.daspeech.checkpoint_files import DecodingSettings
from mmdec.daspeech.dag_decoder import DagConfig
from mmdec.daspeech.hifigan import read_official
from mmdec.daspeech.model import DASpeech, DASpeechConfig
from mmdec.daspeech.vocoder import HifiGanVocoder, MelKind
from mmdec.errors import InputError
from mmdec.hub.publish import new_folder
from mmdec.nn.conformer import encoder_config, from_fairseq

# the first four symbols of every fairseq dictionary, which its files do not list
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
MAX_TEXT_BYTES = 4 * 2**20
MELS = MelKind(sample_rate=22_050)  # the kind of mel spectrogram that DASpeech was trained on
STRATEGIES = {name.replace("-", ""): name for name in ("lookahead", "greedy", "viterbi", "joint-viterbi")}
# arguments of fairseq that change the network -> (the only value that mmdec supports, the value if the argument is
# missing)
REQUIRED: dict[str, tuple[Any, Any]] = {
    "activation_fn": ("gelu", None),
    "attn_type": ("espnet", None),
    "pos_enc_type": ("rel_pos", None),
    "links_feature": ("feature:position", "feature:position"),
    "decoder_learned_pos": (True, False),
    "decoder_normalize_before": (False, False),
    "share_decoder_input_output_embed": (True, False),
    "no_scale_embedding": (False, False),
    "no_token_positional_embeddings": (False, False),
    "layernorm_embedding": (False, False),
    "add_postnet": (False, False),
    "n_frames_per_step": (1, 1),
    "conv_version": ("s2t_transformer", "s2t_transformer"),
}
UNUSED = ("decoder.version", "decoder.embed_length.weight", "tts.embed_positions._float_tensor")
PREDICTORS = ("duration", "pitch", "energy")
_MISSING = object()


@final
@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A published checkpoint after conversion: sizes, weights and decoding options under mmdec's names."""

    config: DASpeechConfig
    state: dict[str, Tensor]  # the weights of a `DASpeech` network by tensor name
    decoding: DecodingSettings


def convert_fairseq(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Convert a folder with a published DASpeech to a folder that `mmdec.load` reads.

    Args:
        source: The published folder, with the files that this module's docstring lists.
        directory: New or empty.

    Returns:
        `directory`.

    Raises:
        InputError: If a file is missing or damaged, if the pickle asks for more than tensors and plain values, and for
            settings of fairseq that mmdec's network does not support.
    """
    folder, target = Path(source), new_folder(directory)
    checkpoint = _find_single(folder, "*.pt")
    config = _yaml(folder / "config.yaml")
    units = read_dictionary(_find_in_folder(folder, config.get("vocab_filename", "vocab.txt")))
    mean, std = _statistics(
        _find_in_folder(folder, config.get("global_cmvn", {}).get("stats_npz_path", "gcmvn_stats.npz"))
    )
    features = config.get("features", {})
    _check_features(features)
    arguments, weights = read_fairseq_checkpoint(checkpoint)
    with report_damage(f"`source` must hold a whole DASpeech, but '{checkpoint}' does not"):
        parts = read_published({**arguments, **_ranges(features)}, weights)
        state = parts.state | {"tts.mel_mean": mean, "tts.mel_std": std}
        model = build_with_weights(lambda: DASpeech(parts.config, len(units)), state, "source", checkpoint)
    generator, _ = read_official(_generator(folder))
    vocoder = HifiGanVocoder(generator, MELS, MELS)
    provenance = {"converted_from": checkpoint.name, "updates": arguments.get("max_update")}
    return save_model(target, model, vocoder, units, decoding=parts.decoding, provenance=provenance)


def read_fairseq_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint of fairseq without running its code.

    Returns:
        The training arguments by name, and the weights by tensor name.

    Raises:
        InputError: For a pickle that names other classes than `argparse.Namespace`, and if training arguments or
            weights are missing.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        stored = read_pickle(path, "Save only its `model` and `args`.")
    weights = stored.get("model") if isinstance(stored, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError(f"`source` must hold its weights as `model`, but '{path}' does not. Download it again.")
    arguments = stored.get("args")
    if arguments is None:
        arguments = (stored.get("cfg") or {}).get("model")
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    if not isinstance(arguments, dict):
        raise InputError(f"`source` must hold `args` or `cfg`, but '{path}' has neither. Download it again.")
    check_finite_weights(weights, path, "source")
    return arguments, weights


def read_published(arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedCheckpoint:
    """Convert fairseq's arguments and weights to sizes and weights of mmdec's network.

    Args:
        arguments: fairseq's arguments by name.
        weights: The tensors by their published names.

    Raises:
        InputError: For settings that mmdec's network does not support, and for weights that are missing or superfluous.
    """
    for name, (required, absent) in REQUIRED.items():
        value = arguments.get(name, absent)
        if value != required:
            raise InputError(
                f"`{name}` must be {required!r} for mmdec's DASpeech, but the checkpoint has {value!r:.60}. Convert a "
                "model of the paper's layout."
            )
    state = {name: value.float() for name, value in weights.items()}
    table, vertices = state["decoder.embed_tokens.weight"], len(state["decoder.embed_positions.weight"]) - 2
    span = arguments.get("max_transition_length", 99999)
    if span != -1 and span < vertices - 1:
        raise InputError(
            f"`max_transition_length` must be unlimited, but is {span}. mmdec's graph has transitions of every length."
        )
    if not torch.equal(state.pop("decoder.output_projection.weight"), table):
        raise InputError("`source` must share its embedding with its output, but has two. Convert a model that shares.")
    for name in UNUSED:
        state.pop(name, None)
    named = {f"encoder.{name}": value for name, value in from_fairseq(state).items()}
    config = DASpeechConfig(
        encoder=encoder_config(from_fairseq(state)),
        dag=_dag_sizes(arguments, state, vertices),
        ar=None,
        tts=_acoustic_sizes(arguments, state),
        adaptor_ffn=len(state["adaptor.fc1.bias"]),
    )
    state = {name: value for name, value in state.items() if not name.startswith("encoder.")}
    named |= _graph(state, config.dag.layers) | _acoustic(state, config.tts)
    if state:
        raise InputError(
            f"`source` must hold only DASpeech's weights, but has {min(state)!r}, {len(state)} in all that mmdec does "
            "not know. Convert a model of the paper's layout."
        )
    strategy = STRATEGIES.get(arguments.get("decode_strategy", "lookahead"), "lookahead")
    decoding = DecodingSettings(
        strategy=strategy,
        lookahead_weight=float(arguments.get("decode_beta", 1)),
        length_penalty=float(arguments.get("decode_viterbibeta", 1)),
        collapse=True,
    )
    return ConvertedCheckpoint(config, named, decoding)


def read_dictionary(path: Path) -> list[str]:
    """Read a fairseq dictionary, which has a symbol and its count on each line.

    Returns:
        All symbols ordered by id, the four special ones first.
    """
    units: list[str] = list(SPECIAL)
    for number, line in enumerate(_text(path).splitlines(), start=1):
        symbol, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not symbol or not count.isdecimal():
            raise InputError(
                f"`source` must hold a symbol and a count a line, but '{path}', line {number}, does not. "
                "Give fairseq's dictionary."
            )
        units.append(symbol)
    if len(set(units)) < len(units):
        raise InputError(f"`source` must name each symbol once, but '{path}' repeats one. Download it again.")
    return units


def _dag_sizes(arguments: Mapping[str, Any], state: Mapping[str, Tensor], vertices: int) -> DagConfig:
    width, heads = state["decoder.embed_tokens.weight"].shape[1], len(state["decoder.gate_linear.bias"])
    if heads != arguments.get("decoder_attention_heads", heads):
        raise InputError(
            f"`source` must have as many link gates as decoder heads, but has {heads} gates. Give a whole checkpoint."
        )
    return DagConfig(
        d_model=width,
        ffn=len(state["decoder.layers.0.fc1.bias"]),
        heads=heads,
        layers=_blocks(state, "decoder.layers."),
        upsample=float(_required_number(arguments, "src_upsample_scale")),
        max_vertices=vertices,
        link_heads=heads,
        link_dim=width // heads,
    )


def _acoustic_sizes(arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> FastSpeech2Config:
    """Read FastSpeech 2's sizes from the checkpoint's arguments and the shapes of its weights."""
    heads = _required_number(arguments, "tts_encoder_attention_heads")
    if heads != _required_number(arguments, "tts_decoder_attention_heads"):
        raise InputError(
            "`source` must have as many heads in FastSpeech 2's encoder as in its decoder, but does not. Convert a "
            "model of the paper's layout."
        )
    first = state["tts.encoder_fft_layers.0.ffn.ffn.0.weight"]
    predictor = state["tts.var_adaptor.duration_predictor.conv1.0.weight"]
    return FastSpeech2Config(
        d_model=first.shape[1],
        encoder_layers=_blocks(state, "tts.encoder_fft_layers."),
        decoder_layers=_blocks(state, "tts.decoder_fft_layers."),
        heads=heads,
        ffn=first.shape[0],
        kernels=(first.shape[2], first.shape[2]),
        predictor=predictor.shape[0],
        predictor_kernel=predictor.shape[2],
        bins=len(state["tts.var_adaptor.embed_pitch.weight"]),
        pitch_range=(float(_required_number(arguments, "pitch_min")), float(_required_number(arguments, "pitch_max"))),
        energy_range=(
            float(_required_number(arguments, "energy_min")),
            float(_required_number(arguments, "energy_max")),
        ),
        mels=len(state["tts.out_proj.bias"]),
        positions="fairseq",
    )


def _graph(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Take the weights of the graph decoder and the adaptor out of `state`, and return them under mmdec's names.

    Args:
        layers: Number of decoder layers.
    """
    named = {"decoder.embed_tokens.weight": state.pop("decoder.embed_tokens.weight")}
    for theirs, ours in (("embed_positions", "embed_positions"), ("link_positional", "links.link_positional")):
        table = state.pop(f"decoder.{theirs}.weight")
        # fairseq stores position 0 in row 2 of the table, mmdec in row 0
        named[f"decoder.{ours}.weight"] = table.roll(-2, 0)
    for index in range(layers):
        place = f"decoder.layers.{index}"
        for attention in ("self_attn", "encoder_attn"):
            named |= _attention(state, f"{place}.{attention}", f"{place}.{attention}")
        for part in ("self_attn_layer_norm", "encoder_attn_layer_norm", "fc1", "fc2", "final_layer_norm"):
            named |= _rename_linear(state, f"{place}.{part}", f"{place}.{part}")
    for part in ("query_linear", "key_linear", "gate_linear"):
        named |= _rename_linear(state, f"decoder.{part}", f"decoder.links.{part}")
    return (
        named
        | _rename_linear(state, "adaptor.fc1", "adaptor.fc1")
        | _rename_linear(state, "adaptor.fc2", "adaptor.fc2")
    )


def _acoustic(state: dict[str, Tensor], sizes: FastSpeech2Config) -> dict[str, Tensor]:
    """Take the weights of FastSpeech 2 out of `state`, and return them under mmdec's names.

    The statistics of pitch and energy are set to mean 0 and standard deviation 1.
    """
    named = {
        "tts.units.weight": state.pop("tts.embed_tokens.weight"),
        "tts.encoder_scale": state.pop("tts.pos_emb_alpha").squeeze(),
        "tts.decoder_scale": state.pop("tts.dec_pos_emb_alpha").squeeze(),
        "tts.pitch_bins.weight": state.pop("tts.var_adaptor.embed_pitch.weight"),
        "tts.energy_bins.weight": state.pop("tts.var_adaptor.embed_energy.weight"),
        "tts.pitch_stats": torch.tensor([0.0, 1.0]),
        "tts.energy_stats": torch.tensor([0.0, 1.0]),
    }
    for stack, layers in (("encoder", sizes.encoder_layers), ("decoder", sizes.decoder_layers)):
        for index in range(layers):
            theirs, ours = f"tts.{stack}_fft_layers.{index}", f"tts.{stack}.{index}"
            named |= _attention(state, f"{theirs}.self_attn", f"{ours}.attention")
            for old, new in (("layer_norm", "attention_norm"), ("ffn.ffn.0", "conv1"), ("ffn.ffn.2", "conv2")):
                named |= _rename_linear(state, f"{theirs}.{old}", f"{ours}.{new}")
            named |= _rename_linear(state, f"{theirs}.ffn.layer_norm", f"{ours}.ffn_norm")
    for name in PREDICTORS:
        theirs, ours = f"tts.var_adaptor.{name}_predictor", f"tts.{name}"
        for old, new in (("conv1.0", "convs.0"), ("conv2.0", "convs.1"), ("ln1", "norms.0"), ("ln2", "norms.1")):
            named |= _rename_linear(state, f"{theirs}.{old}", f"{ours}.{new}")
        named |= _rename_linear(state, f"{theirs}.proj", f"{ours}.out")
    return named | _rename_linear(state, "tts.out_proj", "tts.out")


def _attention(state: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    named = _rename_linear(state, f"{theirs}.q_proj", f"{ours}.q") | _rename_linear(
        state, f"{theirs}.out_proj", f"{ours}.out"
    )
    for tensor in ("weight", "bias"):
        parts = [state.pop(f"{theirs}.{name}_proj.{tensor}") for name in ("k", "v")]
        named[f"{ours}.kv.{tensor}"] = torch.cat(parts)
    return named


def _rename_linear(state: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.{tensor}": state.pop(f"{theirs}.{tensor}") for tensor in ("weight", "bias")}


def _blocks(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({name[len(prefix) :].partition(".")[0] for name in state if name.startswith(prefix)})


def _required_number(arguments: Mapping[str, Any], name: str) -> Any:
    value = arguments.get(name, _MISSING)
    if type(value) not in (int, float):
        raise InputError(f"`source` must name `{name}` in its arguments or config.yaml, but does not. Add it there.")
    return value


def _ranges(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranges of pitch and energy in config.yaml as numbers, because YAML reads 1e-8 as text."""
    names = ("pitch_min", "pitch_max", "energy_min", "energy_max")
    return {name: float(features[name]) for name in names if name in features}


def _check_features(features: Mapping[str, Any]) -> None:
    """Raise InputError unless config.yaml describes mel spectrograms as in the paper.

    Args:
        features: The settings of the mels in config.yaml.
    """
    paper = {"sample_rate": 22_050, "hop_length": 256, "n_fft": 1024, "win_length": 1024, "f_min": 20, "f_max": 8000}
    for name, expected in paper.items():
        if features.get(name, expected) != expected:
            raise InputError(
                f"`{name}` of the mels must be {expected}, but config.yaml has {features[name]!r:.60}. Convert a model "
                "of the paper's mels."
            )


def _statistics(path: Path) -> tuple[Tensor, Tensor]:
    """Read the means and standard deviations of the mel bands, (80,) each, from fairseq's statistics file."""
    with report_damage(f"`source` must hold global statistics of mels, but '{path}' does not"):
        with np.load(path, allow_pickle=False) as stored:
            mean, std = (torch.from_numpy(np.asarray(stored[name], dtype=np.float32)) for name in ("mean", "std"))
        if mean.dim() != 1 or mean.shape != std.shape or not (mean.isfinite() & (std > 0)).all():
            raise ValueError("means and deviations must be finite, of one length, and deviations positive")
    return mean, std


def _generator(folder: Path) -> Path:
    candidates = [
        path for path in sorted(folder.glob("g*")) if path.name.startswith(("g_", "generator")) and path.is_file()
    ]
    if len(candidates) != 1:
        raise InputError(
            f"`source` must hold one HiFi-GAN generator (g_02500000, generator_v1), but '{folder}' has "
            f"{len(candidates)}. Put it there, with its config.json."
        )
    return candidates[0]


def _find_single(folder: Path, pattern: str) -> Path:
    matches = sorted(folder.glob(pattern)) if folder.is_dir() else []
    if len(matches) != 1:
        raise InputError(f"`source` must be a folder with one {pattern}, but '{folder}' has {len(matches)}. Leave one.")
    return matches[0]


def _find_in_folder(folder: Path, name: Any) -> Path:
    """Return the path of a file in `folder`.

    Args:
        name: The file's name, or its path on the training machine; only the last name of this path counts.
    """
    path = folder / Path(str(name)).name
    if not path.is_file():
        raise InputError(f"`source` must hold {path.name}, but '{folder}' does not. Copy it there.")
    return path


def _text(path: Path) -> str:
    with report_damage(f"`source` must hold {path.name} as text, but '{path}' is not"):
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ValueError(f"it has more than {MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")


def _yaml(path: Path) -> dict[str, Any]:
    with report_damage(f"`source` must hold {path.name} in fairseq's format, but '{path}' is not"):
        content = yaml.safe_load(_text(path))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        if not all(isinstance(content.get(part, {}), dict) for part in ("features", "global_cmvn")):
            raise ValueError("`features` and `global_cmvn` must be tables")
    return content
