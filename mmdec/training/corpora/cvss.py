"""CVSS with Common Voice: pairs of French and English speech, read from the corpora's own folders. No sound is read.

<common_voice>/clips/<name>                 source speech
<common_voice>/{split}.tsv                  columns client_id, path, sentence, ... (or validated.tsv for all splits)
<cvss>/{split}/<name>.wav                   target speech
<cvss>/{split}.tsv                          name, translation; no header
<cvss>/{split}.alignment.tsv                name, "phone:end-second ..." (a forced aligner's output; see data/README)
<cvss>/{split}.references.tsv               name, every accepted translation (optional)

Training needs all but the references. Scoring needs the clips, the recordings and their translations.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmdec.phonetics.lexicon import lower_case, read_lexicon, spoken
from mmdec.training.corpora.alignment import parse_alignment
from mmdec.training.corpora.tables import read_table
from mmdec.types import InputError

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
WAV_HEADER = 44  # bytes of a WAV file that holds no samples


@dataclass(frozen=True)
class SpeechPair:
    """One sentence, spoken in both languages."""

    name: str  # of the clip, as both corpora write it
    clip: Path  # source speech
    recording: Path  # target speech
    translation: str  # what the recording says
    references: tuple[str, ...]  # every accepted translation; the recording's own if no others are listed
    alignment: tuple[tuple[str, float], ...]  # of the recording: phone and its end in seconds, pauses included
    source_text: str = ""
    speaker: str = ""

    @property
    def units(self) -> list[str]:
        """The phones of the recording without the pauses at both ends; [] without an alignment."""
        phones = [phone for phone, _ in self.alignment]
        return phones[spoken(phones)]


@dataclass
class BadRows:
    """Rows left out: their names by reason."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.names.setdefault(reason, []).append(name)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.names.values())

    def report(self, shown: int = 5) -> str:
        """One line a reason: how many rows, and the first names."""
        return "\n".join(
            f"{reason}: {len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"
            for reason, names in sorted(self.names.items())
        )


def read_pairs(
    common_voice: Path, cvss: Path, split: str, *, scoring: bool = False
) -> tuple[list[SpeechPair], BadRows]:
    """The usable rows of a split, in the order of its table, and those left out.

    scoring: read rows without a source sentence or an alignment, too. Raises InputError for a missing table, and if no
    row can be used.
    """
    translations = read_translations(cvss, split)
    sentences = {} if scoring else _read_sentences(common_voice, split)
    alignments = read_alignments(cvss, split, required=not scoring)
    references = {line[0]: tuple(filter(None, line[1:])) for line in read_table(cvss / f"{split}.references.tsv")}
    pairs, bad = [], BadRows()
    for name, translation in translations:
        clip, recording = common_voice / "clips" / name, cvss / split / f"{name}.wav"
        alignment = _parse_or_empty(alignments.get(name, ""))
        if not scoring and name not in sentences:
            bad.add("no source sentence", name)
        elif not scoring and name not in alignments:
            bad.add("no alignment", name)
        elif not scoring and not alignment:
            bad.add("alignment that cannot be read", name)
        elif not translation.strip():
            bad.add("no translation", name)
        elif not _holds_more(clip, 0):
            bad.add("source recording missing or empty", name)
        elif not holds_samples(recording):
            bad.add("target recording missing or empty", name)
        else:
            accepted = references.get(name) or (translation,)
            pair = SpeechPair(name, clip, recording, translation, accepted, alignment, *sentences.get(name, ()))
            if pair.units or scoring:
                pairs.append(pair)
            else:
                bad.add("alignment of pauses alone", name)
    if not pairs:
        raise InputError(f"`split` must hold usable rows, but '{split}' has none. Check the paths.\n{bad.report()}")
    return pairs, bad


def read_translations(cvss: Path, split: str) -> list[tuple[str, str]]:
    """(name, translation) of each row of a split; an empty translation if the row has none."""
    table = _check_exists(cvss / f"{split}.tsv")
    return [(line[0], line[1] if len(line) > 1 else "") for line in read_table(table)]


def read_alignments(cvss: Path, split: str, required: bool = True) -> dict[str, str]:
    """Each recording's alignment as the table has it, by name. required: raise InputError for a missing table."""
    table = cvss / f"{split}.alignment.tsv"
    if required:
        _check_exists(table)
    return {line[0]: line[1] if len(line) > 1 else "" for line in read_table(table)}


def normalise(text: str) -> str:
    """Lower case, no punctuation but apostrophes and hyphens, single spaces: equal source sentences become one key."""
    text = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    return " ".join("".join(c if c.isalnum() or c in "'-" else " " for c in text).split())


def canonical(pairs: Iterable[SpeechPair]) -> list[SpeechPair]:
    """One translation for each source sentence: that of its first recording, as distillation at the sequence level
    would give it."""
    first: dict[str, SpeechPair] = {}
    result = []
    for pair in sorted(pairs, key=lambda pair: pair.name):
        chosen = first.setdefault(normalise(pair.source_text), pair)
        target = {"translation": chosen.translation, "alignment": chosen.alignment, "recording": chosen.recording}
        result.append(replace(pair, **target))
    return result


def vocabulary(pairs: Iterable[SpeechPair]) -> list[str]:
    """The special units, then all phones in alphabetical order."""
    return [*SPECIALS, *sorted({unit for pair in pairs for unit in pair.units})]


def holds_samples(wav: Path) -> bool:
    """Whether a WAV file is there and is longer than its header."""
    return _holds_more(wav, WAV_HEADER)


def _holds_more(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size > size


def _check_exists(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"`{path.name}` must exist, but '{path}' does not. Build the corpus, or check the path.")
    return path


def _parse_or_empty(text: str) -> tuple[tuple[str, float], ...]:
    try:
        return tuple(parse_alignment(text))
    except InputError:
        return ()


def _read_sentences(common_voice: Path, split: str) -> dict[str, tuple[str, str]]:
    """Source sentence and speaker of each clip."""
    table = common_voice / f"{split}.tsv"
    lines = read_table(_check_exists(table if table.is_file() else common_voice / "validated.tsv"))
    columns = next(lines, [])
    try:
        path, sentence, speaker = (columns.index(name) for name in ("path", "sentence", "client_id"))
    except ValueError as error:
        raise InputError(
            f"`{table.name}` must have the columns client_id, path and sentence, but has {columns}. "
            "Use Common Voice's own tables."
        ) from error
    return {line[path]: (line[sentence], line[speaker]) for line in lines if len(line) > max(path, sentence, speaker)}


def corpus_lexicon(root: Path) -> dict[str, list[tuple[str, ...]]] | None:
    """Pronunciations of the corpus's English words, in lower case; None where `root` has no lexicon.tsv."""
    path = root / "lexicon.tsv"
    return lower_case(read_lexicon(path)) if path.is_file() else None
