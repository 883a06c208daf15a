"""Reads and writes the folders of translators of word pieces (`mmdec.daspeech.piece_translator`).

A folder holds config.json (with `"layout": "pieces"`); encoder.safetensors, model.safetensors (CTC head, piece reader
and decoders), voice.safetensors and vocoder.safetensors, with matrices in 8 bits; pieces.json (the CTC head's French
pieces), english.json (the decoders' English pieces), phones.json and pronunciation.tsv; README.md (the model card) and
provenance.json. ngram.safetensors (an n-gram of the French pieces) and english_ngram.safetensors may be missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from safetensors.torch import save_file
from torch import Tensor, nn

from mmdec.checks.weights import build_with_weights, check_finite_weights, check_layer_counts, read_weights, weight_file
from mmdec.daspeech.acoustic import FastSpeech2Config
from mmdec.daspeech.checkpoint_files import (
    VOCODER,
    DecodingSettings,
    check_decoding,
    check_half,
    check_inside_folder,
    check_model_vocoder,
    describe_vocoder,
    read_names,
    read_vocoder,
    write_json,
)
from mmdec.daspeech.piece_translator import PhoneVoice, PieceTranslator, PieceTranslatorConfig
from mmdec.daspeech.vocoder import OUR_MELS, MelKind
from mmdec.errors import InputError
from mmdec.hub.provenance import command_record, portable
from mmdec.hub.publish import PROVENANCE, atomic_folder, keep_card
from mmdec.nn.int8 import pack_rows, unpack_rows
from mmdec.phonetics.piece_ngram import PieceNGram
from mmdec.phonetics.pieces import CTC_SPECIAL_PIECES, DECODER_SPECIAL_PIECES, PieceTokenizer, normalise_for_speech
from mmdec.phonetics.spelling import Speller
from mmdec.whisper.unpadded_encoder import UnpaddedEncoderConfig, sinusoid_positions

LAYOUT = "pieces"
TABLES = ("pieces.json", "english.json", "phones.json", "pronunciation.tsv")
WEIGHTS = ("encoder.safetensors", "model.safetensors", "voice.safetensors")
# attribute of the network -> its optional file: an n-gram of French pieces, and an n-gram of English pieces
NGRAMS = {"ngram": "ngram.safetensors", "english_ngram": "english_ngram.safetensors"}
MAX_NGRAM_ENTRIES = 4_000_000  # maximum number of values in an n-gram file
REQUIRED_FILES = ("config.json", *WEIGHTS, VOCODER, *TABLES)
# the position embeddings are the same sinusoids in every Whisper, so they are not stored
POSITIONS = "encoder.embed_positions.weight"
MAX_ENCODER_POSITIONS = 1500  # number of encoder positions in Whisper's window of 30 s


@final
@dataclass(frozen=True)
class PieceTranslatorParts:
    """The networks and tables of one translator of word pieces, on one device.

    `vocoder`: mel (B, F, 80), lengths (B,) -> samples (B, F * 256), like `Vocoder`.
    """

    model: PieceTranslator
    voice: PhoneVoice
    vocoder: nn.Module
    pieces: PieceTokenizer  # French pieces, the CTC head's vocabulary
    english: PieceTokenizer  # English pieces, the decoders' vocabulary
    phones: tuple[str, ...]  # names of the voice's phones, ordered by id
    speller: Speller  # converts English text to phones
    pronunciation: Path  # the file that the speller was read from
    decoding: DecodingSettings
    name: str  # name of the model's folder
    folder: Path | None = None  # the folder that the parts were loaded from; None: they were not loaded from a folder

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """All modules that have weights."""
        return self.model, self.voice, self.vocoder

    @property
    def mels(self) -> MelKind:
        """The kind of mel spectrogram that the voice gives the vocoder."""
        return OUR_MELS

    @property
    def units(self) -> tuple[str, ...]:
        """The English pieces, in the order of their ids."""
        return tuple(self.english.names)

    def source_pieces(self, text: str) -> list[int]:
        """Normalise a French text as in the CTC head's transcripts (lower case), and convert it to piece ids."""
        return self.pieces.encode(normalise_for_speech(text))


def save_piece_translator(
    directory: Path, parts: PieceTranslatorParts, *, provenance: Mapping[str, Any] | None = None
) -> Path:
    """Write a translator's folder, with matrices in 8 bits.

    If writing fails, an existing folder is not changed. Its model card is kept.

    Args:
        directory: The folder to write.
        parts: The translator.
        provenance: Entries of provenance.json in addition to command, versions, commit and date.

    Raises:
        InputError: If an existing folder has a model card and other weights, for which its figures would be wrong.
    """
    vocoder = check_model_vocoder(parts.vocoder)
    with atomic_folder(directory) as fresh:
        config = {
            "system": "daspeech",
            "model_type": "mmdec-daspeech",
            "layout": LAYOUT,
            "architecture": parts.model.sizes.to_dict(),
            "voice": asdict(parts.voice.config),
            "vocoder": describe_vocoder(vocoder),
            "decoding": asdict(parts.decoding),
        }
        write_json(fresh / "config.json", config)
        write_json(fresh / "phones.json", list(parts.phones))
        write_json(
            fresh / PROVENANCE, {**command_record(next(parts.model.parameters()).device), **portable(provenance or {})}
        )
        parts.pieces.save(fresh / "pieces.json")
        parts.english.save(fresh / "english.json")
        shutil.copyfile(parts.pronunciation, fresh / "pronunciation.tsv")
        state = parts.model.state_dict()
        encoder = {name: state.pop(name) for name in list(state) if name.startswith("encoder.")}
        save_encoder(fresh, encoder, parts.model.sizes.encoder)
        save_file(pack_weights(state), fresh / "model.safetensors")
        for name, file in NGRAMS.items():
            if (ngram := getattr(parts.model, name)) is not None:
                save_file(ngram.arrays, fresh / file)
        save_file(pack_weights(parts.voice.state_dict()), fresh / "voice.safetensors")
        save_file(pack_weights(vocoder.state_dict()), fresh / VOCODER)
        keep_card(directory, fresh)
    return directory


def save_encoder(folder: Path, state: dict[str, Tensor], sizes: UnpaddedEncoderConfig) -> None:
    """Write encoder.safetensors, with matrices in 8 bits.

    The position embeddings are left out if they are the sinusoids that every Whisper has.

    Args:
        folder: The translator's folder.
        state: Tensors by name; each name begins with "encoder.".
        sizes: Sizes of the encoder.
    """
    if (state[POSITIONS].cpu() - sinusoid_positions(sizes)).abs().max() < 1e-3:  # half precision may have rounded them
        del state[POSITIONS]
    save_file(pack_weights(state), folder / "encoder.safetensors")


def pack_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights for storing: matrices to 8 bits, other tensors to half precision, on the CPU.

    Args:
        state: Tensors by name.

    Raises:
        MmdecError: For weights that are not finite, or too large for half precision.
    """
    packed = pack_rows({name: tensor.cpu() for name, tensor in state.items()})
    check_half(packed)
    return packed


def read_piece_translator(directory: Path, config: Mapping[str, Any]) -> PieceTranslatorParts:
    """Load a translator to the CPU.

    Args:
        config: The content of its config.json.

    Raises:
        InputError: If files are damaged, do not fit one another, lie outside the folder or are not safetensors. Damaged
            files may also raise other exceptions, which the caller must convert to an error that names the folder.
    """
    encoder, rest, spoken = (weight_file(directory, name) for name in WEIGHTS)
    state, spoken_state = (unpack_rows(read_weights(files)) for files in ([encoder, rest], [spoken]))
    for weights in (state, spoken_state):
        check_finite_weights(weights, directory)  # 8-bit weights may overflow if their scale is damaged
    check_layer_counts(config["architecture"], state)
    check_layer_counts(config["voice"], spoken_state)
    sizes = PieceTranslatorConfig.from_dict(config["architecture"])
    if not 0 < sizes.encoder.positions <= MAX_ENCODER_POSITIONS:
        raise InputError(
            f"`model` must have at most {MAX_ENCODER_POSITIONS} encoder positions, but '{directory}' has "
            f"{sizes.encoder.positions}. Download it again."
        )
    state.setdefault(POSITIONS, sinusoid_positions(sizes.encoder))
    model = build_with_weights(lambda: PieceTranslator(sizes), state, "model", directory)
    for name, count in (("ngram", sizes.head.pieces), ("english_ngram", sizes.reader.units)):
        if (directory / NGRAMS[name]).exists():
            setattr(model, name, _read_ngram(directory, NGRAMS[name], count))
    pieces, english = (
        read_pieces_table(directory, "pieces.json", CTC_SPECIAL_PIECES),
        read_pieces_table(directory, "english.json", DECODER_SPECIAL_PIECES),
    )
    for name, count, expected in (
        ("pieces.json", len(pieces), sizes.head.pieces),
        ("english.json", len(english), sizes.reader.units),
    ):
        if count != expected:
            raise InputError(
                f"`model` must have {expected} pieces in {name}, but '{directory}' has {count}. Download it again."
            )
    phones, shape = read_names(directory / "phones.json"), FastSpeech2Config.from_values(config["voice"])
    voice = build_with_weights(lambda: PhoneVoice(shape, len(phones)), spoken_state, "model", directory)
    file = check_inside_folder(directory / "pronunciation.tsv")
    speller = Speller.read(file)
    spelled = {phone for table in (speller.lexicon, speller.rules) for variant in table.values() for phone in variant}
    if not spelled <= set(phones):
        raise InputError(
            f"`model` must have only phones of its voice in pronunciation.tsv, but '{directory}' has "
            f"{min(spelled - set(phones))!r:.60}. Download it again."
        )
    vocoder = read_vocoder(directory, config)
    decoding = check_decoding(DecodingSettings(**config.get("decoding", {})), graph=model.decoder is not None)
    return PieceTranslatorParts(
        model, voice, vocoder, pieces, english, tuple(phones), speller, file, decoding, directory.name, directory
    )


def _read_ngram(directory: Path, file: str, pieces: int) -> PieceNGram:
    arrays = read_weights([weight_file(directory, file)])
    if sum(tensor.numel() for tensor in arrays.values()) > MAX_NGRAM_ENTRIES:
        raise InputError(
            f"`model` must have n-grams of at most {MAX_NGRAM_ENTRIES} numbers, but '{directory}' has more. "
            "Save the model again."
        )
    return PieceNGram(pieces, arrays)


def read_pieces_table(directory: Path, name: str, special: tuple[str, ...]) -> PieceTokenizer:
    """Read the vocabulary of pieces in the file `name`.

    Raises:
        InputError: Unless its first pieces are those of `special`.
    """
    file = check_inside_folder(directory / name)
    pieces = PieceTokenizer.read(file)
    if tuple(pieces.names[: len(special)]) != special:
        raise InputError(
            f"`model` must have {', '.join(special)} first in {name}, but '{file}' has others. Download it again."
        )
    return pieces
