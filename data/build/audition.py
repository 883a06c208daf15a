"""Which natural voices are understood: every style reads the same sentences, alone and mixed with the French one.

python data/build/audition.py --text data/everyday --voices VOICES/kokoro --out data/audition
python data/build/audition.py --out data/audition --judge WHISPER    # another environment may do this: torch, mmdec

The first command writes recordings and a manifest (resumable); the second lets a Whisper write down what it hears and
prints the words wrong by voice. french_voices.yaml follows from such a table.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tables import journal, read_journal

TALLY = "heard.tsv"
MARGIN = 5.0  # seconds


def voices_to_try(styles: Sequence[str], base: str, shares: Sequence[float]) -> Iterator[dict[str, float]]:
    """Each style at each share, the rest is `base`; `base` alone comes first."""
    yield {base: 1.0}
    for share in shares:
        for style in styles:
            if style != base:
                yield {style: 1.0} if share == 1 else {base: round(1 - share, 2), style: share}


def record(text: Path, voices: Path, out: Path, count: int, shares: Sequence[float]) -> None:
    """Read `count` dev sentences of 6 to 10 words in every voice."""
    import yaml
    from kokoro import Kokoro
    from natural_french import HEADER, MANIFEST, VOICES, read_aloud, read_text, save_recording

    kokoro = Kokoro(voices)
    base = yaml.safe_load(VOICES.read_text(encoding="utf-8"))["base"]
    sentences = [s for s in read_text(text, "dev") if 6 <= len(s.french.split()) <= 10][:count]
    with journal(out / MANIFEST, HEADER) as (done, add):
        for number, shares_of_styles in enumerate(voices_to_try(sorted(kokoro.styles), base, shares)):
            for sentence in sentences:
                name = f"{sentence.name}-{'-'.join(f'{s}{p:g}' for s, p in shares_of_styles.items())}"
                if name in done:
                    continue
                try:
                    samples, speaker = read_aloud(sentence.french, kokoro, shares_of_styles, 1.0)
                except ValueError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                path = Path(f"{number:03d}") / f"{name}.flac"
                seconds = save_recording(out / path, samples)
                add(name, str(path), "dev", speaker, "1", f"{seconds:.3f}", sentence.french)


def judge(out: Path, whisper: str) -> None:
    """Words wrong by voice, the best first: what `whisper` hears, told that it is French; and its words per second."""
    from natural_french import MANIFEST
    from tatoeba import key

    from mmdec.training.metrics.text import word_edits

    rows = {name: row for name, row in read_journal(out / MANIFEST).items() if name != "id"}
    with journal(out / TALLY) as (heard, add):
        missing = [(name, out / row[0]) for name, row in rows.items() if name not in heard]
        for name, text in transcripts(whisper, missing):
            heard[name] = [text]
            add(name, text)
    by_voice: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for name, row in rows.items():
        edits = word_edits(key(row[5].replace("'", " ")), key(heard[name][0].replace("'", " ")))
        by_voice[row[2]].append((edits.errors, edits.length, float(row[4])))
    for voice, counts in sorted(
        by_voice.items(), key=lambda item: sum(c[0] for c in item[1]) / sum(c[1] for c in item[1])
    ):
        wrong, words, seconds = (sum(column) for column in zip(*counts, strict=True))
        print(f"{voice}\t{wrong / words:.1%} of {words} words wrong\t{words / seconds:.1f} words a second")


def transcripts(whisper: str, recordings: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """Greedy French text of each recording, read at its length and `MARGIN` s instead of 30: a fifth of the time, and
    a word in a hundred is heard otherwise."""
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    from mmdec.audio import load_audio
    from mmdec.hub.whisper import load_encoder, load_whisper
    from mmdec.nn.whisper_encoder import read_states

    loaded, encoder = load_whisper(whisper, "cpu"), load_encoder(whisper)
    for name, path in recordings:
        with torch.inference_mode():
            states = BaseModelOutput(read_states(encoder, [load_audio(path)], MARGIN)[0])
            tokens = loaded.model.generate(encoder_outputs=states, language="fr", task="transcribe", max_new_tokens=60)
        yield name, " ".join(loaded.tokenizer.decode(tokens[0], skip_special_tokens=True).split())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="folder of dev.tsv")
    parser.add_argument("--voices", type=Path, help="Kokoro's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the recordings")
    parser.add_argument("--sentences", type=int, default=5, help="that each voice reads (default 5)")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.6], help="of a style (default 1 0.6)")
    parser.add_argument("--judge", metavar="WHISPER", help="a Whisper's name or folder: judge what is there")
    arguments = parser.parse_args()
    if arguments.judge:
        judge(arguments.out, arguments.judge)
    elif arguments.text and arguments.voices:
        record(arguments.text, arguments.voices, arguments.out, arguments.sentences, arguments.shares)
    else:
        parser.error("`--judge`, or `--text` and `--voices`, must be given, but neither is. See --help.")


if __name__ == "__main__":
    main()
