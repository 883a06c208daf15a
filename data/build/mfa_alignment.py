"""Phone alignments of the Montreal Forced Aligner to the table that training reads: {split}.alignment.tsv.

CVSS comes without phones. Align its English half once, then convert:

    conda install -c conda-forge montreal-forced-aligner
    mfa model download acoustic english_us_arpa
    mfa model download dictionary english_us_arpa
    mfa align --single_speaker data/cvss_c/mfa/train english_us_arpa english_us_arpa data/cvss_c/textgrids/train
    python data/build/mfa_alignment.py data/cvss_c/textgrids/train data/cvss_c/train.alignment.tsv

`mfa align` wants each recording beside its text: {name}.mp3.wav and {name}.mp3.lab, which `--transcripts` writes from
the table of translations, with links to the recordings:

    python data/build/mfa_alignment.py --transcripts data/cvss_c/train.tsv data/cvss_c/train data/cvss_c/mfa/train

A line of the result is "common_voice_fr_1.mp3", tab, "pau:0.21 DH:0.30 AH0:0.35 ...": each phone and its END in
seconds. Silence, which MFA writes as "", "sil" or "sp", becomes `pau`; "spn", noise that MFA could not read, stays a
phone, as in the paper. Only Python is needed; files that cannot be used are counted and named, and left out.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tables import write_text

PAUSE = "pau"
SILENCE = {"", "sil", "sp", "<eps>"}
TIER = "phones"
_TOKEN = re.compile(r'"((?:[^"]|"")*)"|(?<![\w.\[])(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?![\w\]])')


class BadTextGrid(ValueError):
    """A file that is no TextGrid with a tier of phones; the message is the reason."""


def read_textgrid(text: str, tier: str = TIER) -> list[tuple[str, float, float]]:
    """Intervals (label, start, end) of the tier, from the long or the short text format.

    Both formats list the same strings and numbers in the same order; the long one wraps them in names
    ("xmin = 0.0", "intervals [1]:"), which are skipped. A tier is its class, name, start, end and number of intervals,
    then start, end and label of each.
    """
    body = text.partition('"TextGrid"')[2]
    if not body:
        raise BadTextGrid("not a TextGrid")
    tokens: Iterator[str | float] = iter(
        match[1].replace('""', '"') if match[2] is None else float(match[2]) for match in _TOKEN.finditer(body)
    )
    try:
        _number(tokens), _number(tokens)
        for _ in range(int(_number(tokens))):
            kind, name = next(tokens), next(tokens)
            _number(tokens), _number(tokens)
            intervals = [_item(tokens, kind == "IntervalTier") for _ in range(int(_number(tokens)))]
            if name == tier and kind == "IntervalTier":
                return intervals
    except StopIteration:
        raise BadTextGrid("cut short") from None
    raise BadTextGrid(f"no tier {tier!r}")


def _number(tokens: Iterator[str | float]) -> float:
    token = next(tokens)
    if isinstance(token, str):
        raise BadTextGrid("damaged")
    return token


def _item(tokens: Iterator[str | float], interval: bool) -> tuple[str, float, float]:
    start = _number(tokens)
    end = _number(tokens) if interval else start
    label = next(tokens)
    if not isinstance(label, str):
        raise BadTextGrid("damaged")
    return label.strip(), start, end


def alignment(intervals: list[tuple[str, float, float]]) -> str:
    """ "pau:0.21 DH:0.30 ...": silences that touch become one, a gap between intervals is silence."""
    phones: list[tuple[str, float]] = []
    last = 0.0
    for label, start, end in intervals:
        if end <= start or start < last - 1e-4:
            raise BadTextGrid("times that do not rise")
        label = PAUSE if label.lower() in SILENCE else label.replace(":", "")
        if start > last + 1e-4:
            phones.append((PAUSE, start))
        phones.append((label, end))
        last = end
    joined = [
        pair
        for number, pair in enumerate(phones)
        if not (pair[0] == PAUSE and number + 1 < len(phones) and phones[number + 1][0] == PAUSE)
    ]
    if all(phone == PAUSE for phone, _ in joined):
        raise BadTextGrid("silence alone")
    if any(re.search(r"\s", phone) for phone, _ in joined):
        raise BadTextGrid("a phone with a space")
    return " ".join(f"{phone}:{end:.4f}".rstrip("0").rstrip(".") for phone, end in joined)


def convert(folder: Path) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """All TextGrids below a folder, by name: (name, alignment) of the good ones, names of the bad ones by reason."""
    rows: list[tuple[str, str]] = []
    bad: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.TextGrid"), key=lambda path: path.name):
        name = clip_name(path.name)
        try:
            data = path.read_bytes()
            wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))  # Praat writes UTF-16 where a label needs it
            rows.append((name, alignment(read_textgrid(data.decode("utf-16" if wide else "utf-8-sig")))))
        except (BadTextGrid, UnicodeDecodeError, OSError) as error:
            reason = str(error) if isinstance(error, BadTextGrid) else "cannot be read"
            bad.setdefault(reason, []).append(name)
    return rows, bad


def clip_name(name: str) -> str:
    """ "common_voice_fr_1.mp3.TextGrid" -> "common_voice_fr_1.mp3"; a name that lost its .mp3 gets it back."""
    stem = name.removesuffix(".TextGrid").removesuffix(".wav")
    return stem if stem.endswith(".mp3") else f"{stem}.mp3"


def write_transcripts(table: Path, wavs: Path, out: Path) -> int:
    """The corpus as `mfa align` wants it: {name}.lab, and beside it a link to {name}.wav; returns how many."""
    count = 0
    out.mkdir(parents=True, exist_ok=True)
    with open(table, encoding="utf-8", newline="") as file:
        for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            wav = wavs / f"{line[0]}.wav" if len(line) > 1 else None
            if wav is None or not wav.is_file():
                continue
            link = out / wav.name
            if not link.exists():
                link.symlink_to(os.path.relpath(wav, out))
            write_text(out / f"{line[0]}.lab", [(line[1],)])
            count += 1
    return count


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 where nothing could be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transcripts", type=Path, metavar="TABLE", help="prepare the aligner's input from this table")
    parser.add_argument("source", type=Path, help="TextGrids; with --transcripts, the folder of recordings")
    parser.add_argument("out", type=Path, help="{split}.alignment.tsv; with --transcripts, a folder")
    options = parser.parse_args(arguments)
    if not options.source.is_dir():
        parser.error(f"`source` must be a folder, but '{options.source}' is not.")
    if options.transcripts is not None:
        print(f"{write_transcripts(options.transcripts, options.source, options.out)} transcripts in {options.out}")
        return 0
    rows, bad = convert(options.source)
    for reason, names in sorted(bad.items()):
        print(f"{reason}: {len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})", file=sys.stderr)
    if not rows:
        print(f"no usable TextGrid below {options.source}", file=sys.stderr)
        return 1
    write_text(options.out, rows)
    print(f"{len(rows)} alignments in {options.out}, {sum(map(len, bad.values()))} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
