"""From checkpoints of a head, a reader and a voice to the folder of a translator that hears people.

python -m mmdec.training.reader.export --encoder openai/whisper-base --head runs/ctc/checkpoints --pieces \\
    runs/ctc/pieces.json --reader runs/reader/checkpoints --english runs/reader/english.json --voice runs/voice \\
    --pronunciation data/english/pronunciation.tsv --vocoder runs/vocoder --out runs/daspeech-everyday

`--voice` is a run of the acoustic stage (tts.safetensors and tts.json), `--vocoder` one of the vocoder's. A folder that
lacks nothing but its encoder, which is a published model's, is made whole by

python -m mmdec.training.reader.export --encoder openai/whisper-base --parts models/daspeech-everyday \\
    --out runs/daspeech-everyday
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmdec.checks.weights import checked_file, fill, read_settings, read_weights
from mmdec.hub.heard_translator import HeardParts, save_encoder, save_heard
from mmdec.hub.publish import whole_folder
from mmdec.hub.translator_files import STRATEGIES, Decoding, check_decoding
from mmdec.hub.whisper_encoder import load_encoder
from mmdec.nn.fastspeech2 import FastSpeech2Config
from mmdec.nn.heard_translator import HeardTranslator, HeardTranslatorConfig
from mmdec.nn.vocoder import Vocoder, VocoderConfig
from mmdec.nn.voice import PhoneVoice
from mmdec.phonetics.pieces import Pieces
from mmdec.phonetics.spelling import Speller
from mmdec.training.checkpoints import load_averaged, newest
from mmdec.training.ctc.module import CtcModule
from mmdec.training.reader.module import ReaderModule
from mmdec.types import InputError, told


@dataclass(frozen=True)
class Runs:
    """Where the parts come from: folders of checkpoints, or one checkpoint; folders; files."""

    encoder: str
    head: Path
    pieces: Path
    reader: Path
    english: Path
    voice: Path
    pronunciation: Path
    vocoder: Path


def export(runs: Runs, out: Path, *, average: int = 1, strategy: str | None = None, card: str | None = None) -> Path:
    """Write a translator's folder.

    average: checkpoints of the head and of the reader whose weights are averaged, the last ones. strategy: the one
    that is used where the caller names none; None: lookahead, or autoregressive without a graph.
    Raises InputError where something is damaged or was trained on other pieces.
    """
    pieces, english = Pieces.read(runs.pieces), Pieces.read(runs.english)
    encoder = load_encoder(runs.encoder)
    head, heard = _trained(lambda options: CtcModule(**options), runs.head, average)
    reader, read = _trained(lambda options: ReaderModule(**{**options, "start": None}), runs.reader, average)
    for name, wanted, found in (
        ("head", pieces.names, head.hparams["units"]),
        ("reader", [pieces.names, english.names], reader.hparams["units"]),
    ):
        if list(found) != wanted:
            raise InputError(f"`{name}` must be trained on these `pieces`, but has others. Name those of its run.")
    config = HeardTranslatorConfig(encoder.config, head.head.config, reader.network.config)
    model = HeardTranslator(config)
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    state |= {f"head.{name}": value for name, value in head.head.state_dict().items()}
    model.load_state_dict(state | reader.network.state_dict())
    voice, phones = read_voice(runs.voice)
    graph = model.decoder is not None
    chosen = strategy or ("lookahead" if graph else "autoregressive")
    parts = HeardParts(
        model=model.eval(),
        voice=voice,
        vocoder=read_vocoder_run(runs.vocoder),
        pieces=pieces,
        english=english,
        phones=phones,
        speller=Speller.read(runs.pronunciation),
        pronunciation=runs.pronunciation,
        decoding=check_decoding(Decoding(chosen, collapse=True), graph),
        name=out.name,
    )
    training = {"encoder": runs.encoder, "head": heard, "reader": read}
    return save_heard(out, parts, card=card, provenance={"training": training})


def complete(parts: Path, encoder: str, out: Path) -> Path:
    """Write the translator of a folder that lacks its encoder alone.

    encoder: the name or folder of the Whisper that it was trained on; its sizes must be those that config.json names.
    Raises InputError where something is damaged, or does not fit.
    """
    network = load_encoder(encoder)
    named = read_settings(parts / "config.json", "parts").get("architecture", {}).get("encoder")
    if named != asdict(network.config):
        raise InputError(f"`encoder` must have the sizes that '{parts / 'config.json'}' names, but has others.")
    state = {f"encoder.{name}": value for name, value in network.state_dict().items()}
    with whole_folder(out) as fresh:
        for file in sorted(parts.iterdir()):
            shutil.copyfile(file, fresh / file.name)
        save_encoder(fresh, state, network.config)
    return out


def _trained(build: Callable[[dict[str, Any]], Any], path: Path, average: int) -> tuple[Any, dict[str, Any]]:
    """A training's module, and what is written down of it."""
    checkpoints = newest(path, average) if path.is_dir() else [path]
    module, step = load_averaged(build, checkpoints)
    options: Mapping[str, Any] = module.hparams
    kept = {name: value for name, value in options.items() if name != "units" and name[0] != "_"}
    return module, {"checkpoints": len(checkpoints), "step": step, "hyperparameters": kept}


def read_voice(folder: Path) -> tuple[PhoneVoice, tuple[str, ...]]:
    """What a run of the acoustic stage wrote: the voice, and its phones by number. Raises InputError for damage."""
    described = read_settings(folder / "tts.json", "voice")
    state = read_weights([checked_file(folder, "tts.safetensors", "voice")], "voice")
    sizes, phones = FastSpeech2Config.from_values(described["config"]), tuple(described["units"])
    named = {f"tts.{name}": value for name, value in state.items()}
    return fill(lambda: PhoneVoice(sizes, len(phones)), named, "voice", folder), phones


def read_vocoder_run(folder: Path) -> Vocoder:
    """What a run of the vocoder wrote. Raises InputError for damage."""
    sizes = VocoderConfig(**read_settings(folder / "vocoder.json", "vocoder")["config"])
    state = read_weights([checked_file(folder, "vocoder.safetensors", "vocoder")], "vocoder")
    return fill(lambda: Vocoder(sizes), state, "vocoder", folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True, help="the name or folder of the Whisper whose encoder hears")
    names = ("head", "pieces", "reader", "english", "voice", "pronunciation", "vocoder")
    for name in names:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--parts", type=Path, help="a translator's folder that lacks its encoder, in place of the runs")
    parser.add_argument("--average", type=int, default=1, help="checkpoints to average, the last ones")
    parser.add_argument("--strategy", choices=STRATEGIES, help="where a caller names none")
    parser.add_argument("--out", type=Path, default=Path("runs/daspeech-everyday"))
    given = vars(parser.parse_args(arguments))
    average, strategy, out, parts = (given.pop(name) for name in ("average", "strategy", "out", "parts"))
    if parts is not None:
        print(complete(parts, given["encoder"], out))
        return
    missing = [f"--{name}" for name in names if given[name] is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}, or --parts")
    print(export(Runs(**given), out, average=average, strategy=strategy))


if __name__ == "__main__":
    with told():
        main()
