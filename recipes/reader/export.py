"""Builds a speech translator's folder from the checkpoints of a CTC head, a text translator (the reader) and a voice.

python recipes/reader/export.py --encoder openai/whisper-base --head runs/ctc/checkpoints --pieces \\
    runs/ctc/pieces.json --reader runs/reader/checkpoints --english runs/reader/english.json --voice runs/voice \\
    --pronunciation data/english/pronunciation.tsv --vocoder runs/vocoder --out runs/daspeech-everyday

`--ngram data/everyday data/phrasebook` adds an n-gram of these folders' French text. A beam search over the head's
output then uses it. `--voice` is a run of the acoustic stage (tts.safetensors and tts.json), `--vocoder` a run of the
vocoder stage. With `--model`, give only the newly trained parts; the other parts are copied from that translator:

python recipes/reader/export.py --model daspeech-everyday --head runs/ctc/checkpoints --out runs/everyday
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from mmdec.daspeech.checkpoint import load_encoder, load_piece_translator
from mmdec.daspeech.checkpoint_files import DecodingSettings, check_decoding
from mmdec.daspeech.options import STRATEGIES
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts, save_piece_translator
from mmdec.daspeech.piece_translator import PhoneVoice, PieceTranslator, PieceTranslatorConfig
from mmdec.daspeech.training.reader.module import load_module
from mmdec.daspeech.training.vocoder import load_acoustic, load_vocoder
from mmdec.drafters.ctc.training import module as ctc
from mmdec.errors import InputError, exit_on_error
from mmdec.phonetics.ngram import NGram
from mmdec.phonetics.piece_ngram import PieceNGram
from mmdec.phonetics.pieces import CTC_SPECIAL_PIECES, DECODER_SPECIAL_PIECES, PieceTokenizer, normalise_for_speech
from mmdec.phonetics.spelling import Speller
from mmdec.training.checkpoints import newest_checkpoints
from mmdec.training.corpora.text_files import read_training_pairs


@dataclass(frozen=True)
class Runs:
    """Where each component of a speech translator comes from. None: take it from `model`, an existing translator.

    encoder: name or folder of a Whisper. pieces, english: files of the French and of the English subword pieces.
    head, reader: a checkpoint or a folder of checkpoints, of the CTC head and of the text translator.
    voice, vocoder: output folders of their trainings. pronunciation: file of English pronunciations.
    ngram, english_ngram: folders of sentence pairs, from which a French or an English n-gram is counted.
    model: name or folder of the existing translator.
    """

    encoder: str | None = None
    head: Path | None = None
    pieces: Path | None = None
    reader: Path | None = None
    english: Path | None = None
    voice: Path | None = None
    pronunciation: Path | None = None
    vocoder: Path | None = None
    ngram: list[Path] | None = None
    english_ngram: list[Path] | None = None
    model: str | None = None


OPTIONAL = ("ngram", "english_ngram", "model")
FRENCH = (80_000, 170_000, 220_000)  # the most n-grams of orders 2, 3 and 4 in the French model, which then has 2 MB
ENGLISH = (100_000, 80_000)  # the most n-grams of orders 2 and 3 in the English model


def export(runs: Runs, out: Path, *, average: int = 1, strategy: str | None = None) -> Path:
    """Assemble a speech translator, write it to the folder `out`, and return this folder.

    average: number of last checkpoints of the head, and of the reader, whose weights are averaged.
    strategy: the default decoding strategy. None: "lookahead", or "autoregressive" if there is no graph decoder (one
        that decodes in parallel); with `runs.model`, the strategy of that model.
    Raises: InputError if a component is damaged, missing, or was trained on other pieces.
    """
    missing = [field.name for field in fields(runs) if getattr(runs, field.name) is None and field.name not in OPTIONAL]
    if missing and runs.model is None:
        raise InputError(f"`{missing[0]}` must be given, or `model`, whose it is, but neither is. Name one.")
    # without `model` the base is None, and is not used
    base = cast(PieceTranslatorParts, load_piece_translator(runs.model) if runs.model else None)
    pieces = PieceTokenizer.read(runs.pieces) if runs.pieces else base.pieces
    english = PieceTokenizer.read(runs.english) if runs.english else base.english
    encoder = load_encoder(runs.encoder) if runs.encoder else base.model.encoder
    training: dict[str, Any] = {} if runs.model is None else {"model": base.name}
    if runs.head:
        module, training["head"] = _trained(ctc.load_module, runs.head, average)
        _same_pieces("head", pieces.names, module.hparams["units"])
        head = module.head
        if module.top is not None:
            encoder = module.top.give(encoder)
    else:
        head = base.model.head
    if runs.reader:
        module, training["reader"] = _trained(load_module, runs.reader, average)
        _same_pieces("reader", [pieces.names, english.names], module.hparams["units"])
        reader, sizes = module.network.state_dict(), module.network.config
    else:
        reader, sizes = base.model.state_dict(), base.model.sizes.reader
        reader = {name: value for name, value in reader.items() if not name.startswith(("encoder.", "head."))}
    if runs.encoder:
        training["encoder"] = runs.encoder
    model = PieceTranslator(PieceTranslatorConfig(encoder.config, head.config, sizes))
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    state |= {f"head.{name}": value for name, value in head.state_dict().items()}
    model.load_state_dict(state | reader)
    if runs.model:  # the model's n-gram is reused only if its pieces are the same
        model.ngram = base.model.ngram if pieces.names == base.pieces.names else None
        model.english_ngram = base.model.english_ngram if english.names == base.english.names else None
    if runs.ngram:
        model.ngram = french_ngram(runs.ngram, pieces)
    if runs.english_ngram:
        model.english_ngram = english_ngram(runs.english_ngram, english)
    voice, phones = read_voice(runs.voice) if runs.voice else (base.voice, base.phones)
    pronunciation = runs.pronunciation or base.pronunciation
    graph = model.decoder is not None
    chosen = strategy or ("lookahead" if graph else "autoregressive")
    if runs.model and strategy is None:
        chosen = base.decoding.strategy
    parts = PieceTranslatorParts(
        model=model.eval(),
        voice=voice,
        vocoder=load_vocoder(runs.vocoder) if runs.vocoder else base.vocoder,
        pieces=pieces,
        english=english,
        phones=phones,
        speller=Speller.read(pronunciation),
        pronunciation=pronunciation,
        decoding=check_decoding(DecodingSettings(chosen, collapse=True), graph),
        name=out.name,
    )
    return save_piece_translator(out, parts, provenance={"training": training})


def read_voice(folder: Path) -> tuple[PhoneVoice, tuple[str, ...]]:
    """Load the voice, an acoustic model, from the output folder of its training. Returns the voice, and its phones
    ordered by id. Raises InputError for damaged files."""
    tts, phones = load_acoustic(folder, "voice")
    voice = PhoneVoice(tts.config, len(phones))
    voice.tts = tts
    return voice, tuple(phones)


def french_ngram(folders: Sequence[Path], pieces: PieceTokenizer) -> PieceNGram:
    """Count an n-gram of French pieces from the training sentences in folders of sentence pairs. Repeated sentences
    count once."""
    texts = (normalise_for_speech(pair.source) for pairs in read_training_pairs(folders) for pair in pairs)
    return _piece_ngram(texts, pieces, CTC_SPECIAL_PIECES, FRENCH)


def english_ngram(folders: Sequence[Path], pieces: PieceTokenizer) -> PieceNGram:
    """Count an n-gram of English pieces from the translations in folders of sentence pairs. Repeated sentences count
    once."""
    texts = (text for pairs in read_training_pairs(folders) for pair in pairs for text in pair.references)
    return _piece_ngram(texts, pieces, DECODER_SPECIAL_PIECES, ENGLISH)


def _piece_ngram(
    texts: Iterable[str], pieces: PieceTokenizer, special: Sequence[str], entries: Sequence[int]
) -> PieceNGram:
    sentences = ([str(piece) for piece in pieces.encode(text)] for text in dict.fromkeys(texts))
    known = (str(piece) for piece in range(len(special), len(pieces)))
    order = len(entries) + 1
    return PieceNGram.pack(NGram.build(sentences, order=order, vocabulary=known, max_entries=entries), len(pieces))


def _same_pieces(part: str, wanted: object, found: object) -> None:
    if found != wanted:
        raise InputError(f"`{part}` must be trained on these `pieces`, but has others. Name those of its run.")


def _trained(load: Callable[[Sequence[Path]], tuple[Any, int]], path: Path, average: int) -> tuple[Any, dict[str, Any]]:
    """Load a training module. Returns the module, and a dict for provenance.json with its step and options.

    load: loads the module from checkpoints, with the mean of their weights.
    path: a checkpoint, or a folder, whose last `average` checkpoints are used.
    """
    checkpoints = newest_checkpoints(path, average) if path.is_dir() else [path]
    module, step = load(checkpoints)
    options: Mapping[str, Any] = module.hparams
    kept = {name: value for name, value in options.items() if name != "units" and name[0] != "_"}
    return module, {"checkpoints": len(checkpoints), "step": step, "hyperparameters": kept}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: write a speech translator's folder, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a translator, whose is what no other argument names")
    parser.add_argument("--encoder", help="the name or folder of the Whisper whose encoder hears")
    for name in ("head", "pieces", "reader", "english", "voice", "pronunciation", "vocoder"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--ngram", type=Path, nargs="+", help="folders of text whose French spells what is heard")
    parser.add_argument("--english-ngram", type=Path, nargs="+", help="folders whose English guides the beam search")
    parser.add_argument("--average", type=int, default=1, help="checkpoints to average, the last ones")
    parser.add_argument("--strategy", choices=STRATEGIES, help="where a caller names none")
    parser.add_argument("--out", type=Path, default=Path("runs/daspeech-everyday"))
    given = vars(parser.parse_args(arguments))
    average, strategy, out = (given.pop(name) for name in ("average", "strategy", "out"))
    print(export(Runs(**given), out, average=average, strategy=strategy))


if __name__ == "__main__":
    with exit_on_error():
        main()
